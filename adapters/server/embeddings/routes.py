"""`/v1/embeddings`, `/v1/score`, `/v1/rerank` and Ollama's `/api/embed` over one embedding model."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from graftlm.adapters.server.access import current
from graftlm.adapters.server.endpoints.body import Fields, limit
from graftlm.adapters.server.http.errors import ApiError, api_error, field_names
from graftlm.core.errors import ConfigError, GraftError

if TYPE_CHECKING:
    from graftlm.adapters.server.app import Server
    from graftlm.adapters.server.embeddings.model import EmbeddingModel

Result = TypeVar("Result")
AnyTexts = TypeVar("AnyTexts", bound="TextsBody")


class TextsBody(Fields):
    """The fields of all four routes."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)


class EmbeddingsBody(TextsBody):
    """The body of `/v1/embeddings`: texts, or token ids of the embedding model."""

    input: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)


class EmbedBody(TextsBody):
    """The body of Ollama's `/api/embed`."""

    input: str | list[str] = Field(min_length=1)
    truncate: bool = True
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    dimensions: int | None = Field(default=None, ge=1)


class ScoreBody(TextsBody):
    """The body of `/v1/score`: one text with each of several, or as many of both."""

    text_1: str | list[str]
    text_2: str | list[str]


class RerankBody(TextsBody):
    """The body of `/v1/rerank`."""

    query: str
    documents: list[str] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True


class Embeddings:
    """The routes. Without a model they answer 404 with the models that there are."""

    def __init__(self, server: Server, model: EmbeddingModel | None) -> None:
        self.model = model
        self._server = server
        self._worker = ThreadPoolExecutor(1, "graftlm embeddings")  # competes with the engine for cores

    def routes(self) -> list[Route]:
        named = {"/embeddings": self.embeddings, "/score": self.score, "/rerank": self.rerank}
        routes = [
            Route(f"{start}{path}", call, methods=["POST"]) for path, call in named.items() for start in ("/v1", "")
        ]
        return [*routes, Route("/api/embed", self.ollama, methods=["POST"])]

    async def embeddings(self, http: HttpRequest) -> Response:
        model, body = await self._read(http, EmbeddingsBody)
        texts = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else body.input
        vectors, num = await self._vectors(model, body, texts, body.dimensions)
        form = (lambda v: base64.b64encode(v.tobytes()).decode()) if body.encoding_format == "base64" else _floats
        data = [{"object": "embedding", "index": i, "embedding": form(vector)} for i, vector in enumerate(vectors)]
        return JSONResponse({"object": "list", "data": data, "model": body.model or model.name, "usage": _usage(num)})

    async def ollama(self, http: HttpRequest) -> Response:
        model, body = await self._read(http, EmbedBody)
        if body.truncate and body.truncate_prompt_tokens is None:
            body.truncate_prompt_tokens = -1
        texts = [body.input] if isinstance(body.input, str) else body.input
        started = time.monotonic()
        vectors, num = await self._vectors(model, body, texts, body.dimensions)
        took = {"total_duration": int((time.monotonic() - started) * 1e9), "load_duration": 0, "prompt_eval_count": num}
        return JSONResponse({"model": body.model or model.name, "embeddings": [_floats(v) for v in vectors], **took})

    async def score(self, http: HttpRequest) -> Response:
        model, body = await self._read(http, ScoreBody)
        first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
        second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second) or not first:
            message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many, and at least one"
            raise ApiError(400, message, param="text_1")
        scores, num = await self._scores(model, body, list(zip(first, second, strict=True)))
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        head = {"id": f"score-{current().id or secrets.token_hex(8)}", "object": "list", "model": model.name}
        return JSONResponse({**head, "data": data, "usage": _usage(num)})

    async def rerank(self, http: HttpRequest) -> Response:
        model, body = await self._read(http, RerankBody)
        scores, num = await self._scores(model, body, [(body.query, text) for text in body.documents])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results = [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
            for i in order
        ]
        head = {"id": f"rerank-{current().id or secrets.token_hex(8)}", "model": model.name}
        return JSONResponse({**head, "results": results, "usage": {"total_tokens": num}})

    async def _read(self, http: HttpRequest, kind: type[AnyTexts]) -> tuple[EmbeddingModel, AnyTexts]:
        body = await self._server.bodies.read(http, kind)
        current().model = body.model or (self.model.name if self.model is not None else "")
        if self.model is None:
            message = "no model here gives embeddings; start the server with --embedding-model FOLDER"
            raise ApiError(404, message, param="model", code="model_not_found")
        if body.model is not None and body.model.removesuffix(":latest") != self.model.name:
            message = f"the model {body.model!r} gives no embeddings here; use {self.model.name}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self.model, body

    async def _vectors(self, model: EmbeddingModel, body: TextsBody, texts: Any, dimensions: int | None) -> Any:
        def compute() -> Any:
            limit("input", len(texts), self._server.settings.limits.sequences_per_request, "texts")
            if dimensions not in (None, model.dimensions):
                raise ConfigError(
                    f"dimensions is {dimensions}, vectors of {model.name} have {model.dimensions}; leave it out"
                )
            ids = [
                model.encode(text, truncate=body.truncate_prompt_tokens) if isinstance(text, str) else text
                for text in texts
            ]
            model.check(ids)
            return model.embed(ids), sum(map(len, ids))

        return await self._run(compute, type(body))

    async def _scores(
        self, model: EmbeddingModel, body: TextsBody, pairs: list[tuple[str, str]]
    ) -> tuple[list[float], int]:
        def compute() -> tuple[list[float], int]:
            limit("documents", len(pairs), self._server.settings.limits.sequences_per_request, "texts")
            return model.score(pairs, truncate=body.truncate_prompt_tokens)

        return await self._run(compute, type(body))

    async def _run(self, compute: Callable[[], Result], kind: type[TextsBody]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, compute)
        except GraftError as error:
            raise api_error(error, field_names(kind)) from error


def _floats(vector: Any) -> list[float]:
    found: list[float] = vector.tolist()
    return found


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
