"""Routes for routers, monitors and clients: models, health, version and capacity."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import graftlm
from graftlm.adapters.server.http.errors import ApiError
from graftlm.core.chat.thinking import learn_thinking

if TYPE_CHECKING:
    from graftlm.adapters.server.app import Server
    from graftlm.core.runtime import Runtime


def abilities(runtime: Runtime) -> list[str]:
    """Return what the model can do in words of Ollama: "completion", and further ones of a chat model."""
    tokenizer = runtime.tokenizer
    if not tokenizer.has_chat_template:
        return ["completion"]
    more = {"thinking": learn_thinking(tokenizer) is not None, "vision": reads_pictures(runtime)}
    return ["completion", "chat", "tools", *(name for name, has in more.items() if has)]


def reads_pictures(runtime: Runtime) -> bool:
    """Return True for a local model that reads pictures here."""
    return runtime.tokenizer.media is not None and not runtime.stats().no_images


def info_routes(server: Server) -> list[Route]:
    """Return the routes that answer without running the model."""
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        length = server.runtime.max_model_len
        named = {"id": name, "object": "model", "created": created, "owned_by": "graftlm"}
        named |= {"root": server.runtime.model_name, "parent": server.model_names[0] if name in aliases else None}
        return {**named, "max_model_len": length, "context_length": length, "capabilities": abilities(server.runtime)}

    aliases = server.model_names[1:]

    async def models(http: HttpRequest) -> Response:
        data = await asyncio.to_thread(lambda: [card(name) for name in server.model_names])
        if (embeds := server.embeddings.model) is not None:
            named = {
                "id": embeds.name,
                "object": "model",
                "created": created,
                "owned_by": "graftlm",
                "root": embeds.name,
            }
            can = ["score", "rerank"] if embeds.is_cross_encoder else ["embedding", "score", "rerank"]
            lengths = {"max_model_len": embeds.max_tokens, "context_length": embeds.max_tokens}
            data.append({**named, "parent": None, **lengths, "capabilities": can})
        return JSONResponse({"object": "list", "data": data})

    async def model(http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name not in server.model_names:
            message = f"the model {name!r} does not exist here; use {', '.join(server.model_names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(await asyncio.to_thread(card, name))

    async def health(http: HttpRequest) -> Response:
        reason = server.unavailable()
        if reason is not None:
            raise ApiError(503, reason, kind="server_error", code="unavailable", retry_after=5)
        return JSONResponse({"status": "ok"})

    async def metrics(http: HttpRequest) -> Response:
        text = await asyncio.to_thread(server.metrics.text)  # the figures of remote replicas take as long as an answer
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(http: HttpRequest) -> Response:
        return JSONResponse({"version": graftlm.__version__})

    async def server_info(http: HttpRequest) -> Response:
        stats = await asyncio.to_thread(server.runtime.stats)
        return JSONResponse(
            {
                "model_path": server.runtime.model_name,
                "served_model_name": server.model_names[0],
                "tokenizer_path": server.runtime.model_name,
                "is_generation": True,
                "max_model_len": server.runtime.max_model_len,
                "max_total_num_tokens": stats.slots_total,
                "max_running_requests": server.runtime.config.max_batch,
                "page_size": server.runtime.config.cache.page_size,
                "dp_size": max(1, stats.replicas),
                "replica_restarts": stats.restarts,
                "tp_size": 1,
                "slots_in_use": stats.slots_in_use,
                "slots_cached": stats.slots_cached,
                "weights": stats.weights,
                "kv": stats.kv,
                "version": graftlm.__version__,
            }
        )

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        *(Route(path, health) for path in ("/health", "/health_generate", "/ping")),
        Route("/metrics", metrics),
        Route("/version", version),
        *(Route(path, server_info) for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info")),
    ]
