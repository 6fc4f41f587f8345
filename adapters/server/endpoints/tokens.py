"""`/tokenize`, `/detokenize` and `/tokenizer_info`, compatible with vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from graftlm.adapters.server.endpoints.body import limit
from graftlm.adapters.server.endpoints.completions import token_text
from graftlm.adapters.server.http.errors import api_error, field_names
from graftlm.adapters.server.media import check_picture_options, frames_of_videos, holds_media
from graftlm.core.errors import ConfigError, GraftError

if TYPE_CHECKING:
    from graftlm.adapters.server.app import Server


MAX_TOKENS = 1 << 17
"""Tokens that one request may encode or decode, where the context is shorter. Clients cut texts by their tokens."""


class TokenizeBody(BaseModel):
    """A text, or messages to render with the chat template, of which some hold pictures."""

    model_config = ConfigDict(extra="forbid")
    TEXT_LIMITS: ClassVar = {"prompt": "tokenize_chars"}

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None

    def ids(self, server: Server) -> list[int]:
        runtime = server.runtime
        if (self.prompt is None) == (self.messages is None):
            raise ConfigError("prompt and messages: give exactly one of them")
        if self.prompt is not None:
            limit("prompt", len(self.prompt), server.settings.limits.tokenize_chars, "characters")
            tokenizer = runtime.tokenizer
            given = tokenizer.encode_within(self.prompt, max(MAX_TOKENS, runtime.max_model_len))
            if isinstance(given, GraftError):
                raise given
            found: list[int] = (tokenizer.with_bos(given) if self.add_special_tokens else given).tolist()
            return found
        num_frames, options = frames_of_videos(self.media_io_kwargs), self.mm_processor_kwargs
        if options:
            check_picture_options(runtime, options)
        messages: Sequence[Any] = self.messages or []
        if holds_media(messages):
            messages = server.media.read(messages, num_frames, options)
        encoded = runtime.processor.encode(messages, self.tools, add_generation_prompt=self.add_generation_prompt)
        ids: list[int] = encoded.model_ids.tolist()
        return ids


class DetokenizeBody(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[int]


_FIELDS = field_names(DetokenizeBody)


def token_routes(server: Server) -> list[Route]:
    """Return the three routes."""

    async def tokenizer_info(http: HttpRequest) -> Response:
        hf = server.runtime.tokenizer.hf
        special = {name: str(token) for name, token in hf.special_tokens_map.items() if not isinstance(token, list)}
        return JSONResponse({**special, "chat_template": getattr(hf, "chat_template", None)})

    async def tokenize(http: HttpRequest) -> Response:
        body = await server.read(http, TokenizeBody)
        tokenizer = server.runtime.tokenizer
        try:
            ids = await server.run(partial(body.ids, server), apart=True)
        except GraftError as error:
            raise api_error(error, field_names(TokenizeBody)) from error

        def answer() -> Response:
            texts = [token_text(tokenizer, i) for i in ids] if body.return_token_strs else None
            length = server.runtime.max_model_len
            return JSONResponse({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts})

        return await server.run(answer)

    async def detokenize(http: HttpRequest) -> Response:
        body = await server.read(http, DetokenizeBody)
        size = server.runtime.tokenizer.vocab_size
        most = max(MAX_TOKENS, server.runtime.max_model_len)
        if len(body.tokens) > most:
            raise api_error(ConfigError(f"tokens has {len(body.tokens):,} ids; at most {most:,} are decoded"), _FIELDS)
        wrong = next((i for i in body.tokens if not 0 <= i < size), None)
        if wrong is not None:
            raise api_error(ConfigError(f"tokens has {wrong:,}; the model knows 0 to {size - 1:,}"), _FIELDS)
        text = await server.run(partial(server.runtime.tokenizer.decode, body.tokens, False), apart=True)
        return JSONResponse({"prompt": text})

    return [
        Route("/tokenizer_info", tokenizer_info),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
