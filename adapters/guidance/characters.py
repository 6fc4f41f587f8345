"""Texts of whole characters: a token limit can cut a character, and guidance's interpreter decodes strictly."""

from __future__ import annotations

import codecs
from collections.abc import Generator
from contextlib import closing
from typing import Any

from guidance._schema import EngineResponse, TokenUsage
from guidance.models._engine._interpreter import recode_special_tokens


def whole_characters(
    tokenizer: Any, responses: Generator[EngineResponse, None, TokenUsage]
) -> Generator[EngineResponse, None, TokenUsage]:
    """Yield the responses without incomplete characters at the ends of texts and captures; return the usage."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    with closing(responses):
        while True:
            try:
                response = next(responses)
            except StopIteration as stop:
                usage: TokenUsage = stop.value
                return usage
            response.new_bytes = decoder.decode(recode_special_tokens(tokenizer, response.new_bytes)).encode()
            response.capture_groups = {name: _whole(value) for name, value in response.capture_groups.items()}
            yield response


def _whole(captured: Any) -> Any:
    if isinstance(captured, list):
        return [_whole(one) for one in captured]
    return captured.decode(errors="ignore").encode()
