"""Streamed answers as lm15's events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dspy import lm15
from graftlm.adapters.dspy import wire as wire
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import AnswerReader, ParsedAnswer
from graftlm.core.request import Chunk


class Events:
    """The stream events of one answer; tool calls are separated from text."""

    def __init__(self, model: str, form: ToolFormat | None) -> None:
        self._model = model
        self._reader = AnswerReader(form)
        self._others: dict[int, list[str]] = {}

    def start(self) -> lm15.StreamStartEvent:
        return lm15.StreamStartEvent(id=f"{wire.PROVIDER}-stream", model=self._model)

    def of(self, chunk: Chunk) -> Iterator[Any]:
        if chunk.index:
            # DSPy's listeners follow the first of n answers; the other texts are in the end event
            self._others.setdefault(chunk.index, []).append(chunk.text)
        else:
            yield from self._deltas(chunk)
        if chunk.usage is not None:
            yield self._end(chunk)

    def _deltas(self, chunk: Chunk) -> Iterator[Any]:
        logprobs = tuple(wire.token_logprobs(chunk.logprobs or ()))
        for delta in self._reader.read(chunk):
            if delta.index is None:
                for piece in wire.split_at_headers(delta.text):
                    yield lm15.StreamDeltaEvent(lm15.TextDelta(piece, logprobs=logprobs))
                    logprobs = ()
            else:
                part = lm15.ToolCallDelta(delta.text, part_index=delta.index + 1, id=delta.id, name=delta.name)
                yield lm15.StreamDeltaEvent(part)

    def _end(self, chunk: Chunk) -> lm15.StreamEndEvent:
        wire.check_calls(ParsedAnswer("", invalid=tuple(self._reader.invalid)))
        called = bool(self._reader.calls)
        assert chunk.usage is not None
        return lm15.StreamEndEvent(
            finish_reason="tool_call" if called else wire.finish_reason(chunk.finish_reason),
            usage=wire.usage(chunk.usage),
        )
