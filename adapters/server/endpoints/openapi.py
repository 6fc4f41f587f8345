"""`/openapi.json`: the API as OpenAPI 3.1, from the models that validate bodies; and `/docs`, a page that shows it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

import graftlm
from graftlm.adapters.server.dialects.messages import CountBody, MessagesBody
from graftlm.adapters.server.dialects.ollama import GenerateBody, OllamaChatBody, ShowBody
from graftlm.adapters.server.dialects.responses import ResponsesBody
from graftlm.adapters.server.embeddings.routes import EmbedBody, EmbeddingsBody, RerankBody, ScoreBody
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.adapters.server.endpoints.completions import CompletionBody
from graftlm.adapters.server.endpoints.tokens import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from graftlm.adapters.server.app import Server

_SCHEMAS = "#/components/schemas/{model}"

_POSTS: dict[str, tuple[type[BaseModel], str, str]] = {
    "/v1/chat/completions": (ChatBody, "OpenAI", "Answer messages; tools, schemas, streams"),
    "/v1/completions": (CompletionBody, "OpenAI", "Continue a prompt, or score it with echo"),
    "/v1/responses": (ResponsesBody, "OpenAI", "Answer in OpenAI's Responses API"),
    "/v1/messages": (MessagesBody, "Anthropic", "Answer in Anthropic's Messages API"),
    "/v1/messages/count_tokens": (CountBody, "Anthropic", "Count the tokens of messages"),
    "/api/chat": (OllamaChatBody, "Ollama", "Answer messages in Ollama's API"),
    "/api/generate": (GenerateBody, "Ollama", "Answer a prompt in Ollama's API"),
    "/api/show": (ShowBody, "Ollama", "Describe the model"),
    "/v1/embeddings": (EmbeddingsBody, "embeddings", "Embed texts"),
    "/v1/score": (ScoreBody, "embeddings", "Score pairs of texts"),
    "/v1/rerank": (RerankBody, "embeddings", "Rank documents by a query"),
    "/api/embed": (EmbedBody, "Ollama", "Embed texts in Ollama's API"),
    "/tokenize": (TokenizeBody, "tokens", "Encode a text or messages"),
    "/detokenize": (DetokenizeBody, "tokens", "Decode token ids"),
}
_STREAMS = {
    "/api/chat": "application/x-ndjson",
    "/api/generate": "application/x-ndjson",
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"), "text/event-stream"),
}
_TOLD = {
    "/": "A page with load, latencies and open requests",
    "/health": "200 if the engine answers, else 503",
    "/metrics": "Metrics for Prometheus",
    "/v1/models": "The model under each of its names",
    "/stats": "The figures of the page",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"], "description": "a short name for programs"},
            },
        }
    },
}


def openapi_routes(server: Server) -> list[Route]:
    """Return the routes of the description and of its page."""

    async def description(http: HttpRequest) -> Response:
        return JSONResponse(describe(http.app.routes, secured=bool(server.settings.api_keys)))

    async def page(http: HttpRequest) -> Response:
        return HTMLResponse(page_html())

    return [Route("/openapi.json", description), Route("/docs", page)]


def describe(routes: list[Route], *, secured: bool) -> dict[str, Any]:
    """Return the description of all routes; a body has the schema of the model that validates it.

    secured  True for a server with API keys
    """
    schemas: dict[str, Any] = {"Error": _ERROR, **_body_schemas()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(path, method)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "GraftLM", "version": graftlm.__version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if secured:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"bearer": []}, {"key": []}]
    return found


@cache
def page_html() -> str:
    """Return the page, which reads the description and loads nothing else."""
    return Path(__file__).with_name("openapi.html").read_text()


@cache
def _body_schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for kind, _, _ in _POSTS.values():
        schema = kind.model_json_schema(ref_template=_SCHEMAS, mode="validation")
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
    return schemas


def _operation(path: str, method: str) -> dict[str, Any]:
    error = {
        "description": "an error",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    answer: dict[str, Any] = {"description": "the answer", "content": {"application/json": {"schema": {}}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {"responses": {"200": answer, "default": error}}
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST" and path in _POSTS:
        kind, tag, told = _POSTS[path]
        schema = {"$ref": _SCHEMAS.format(model=kind.__name__)}
        found |= {"summary": told, "tags": [tag]}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if path in _STREAMS:
            answer["content"][_STREAMS[path]] = {"schema": {"type": "string"}}
    elif path in _TOLD:
        found["summary"] = _TOLD[path]
    return found
