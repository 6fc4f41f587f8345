"""The routes of all dialects over one server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import graftlm
from graftlm.adapters.server.access import access_of
from graftlm.adapters.server.bodies import MAX_IGNORED
from graftlm.adapters.server.dialects import messages, ollama
from graftlm.adapters.server.dialects.messages import CountBody, MessagesBody, MessageWriter
from graftlm.adapters.server.dialects.ollama import GenerateBody, OllamaChatBody, OllamaWriter
from graftlm.adapters.server.dialects.response_store import ResponseStore, Stored
from graftlm.adapters.server.dialects.response_writer import ResponseWriter
from graftlm.adapters.server.dialects.responses import ResponsesBody, output_messages
from graftlm.adapters.server.endpoints.chat import ChatBody
from graftlm.adapters.server.endpoints.info import abilities
from graftlm.adapters.server.http.errors import ApiError, api_error, field_names, invalid_body, register_form
from graftlm.adapters.server.http.responses import EventStream, WholeAnswer, Writer
from graftlm.core.errors import GraftError, RequestCancelled

if TYPE_CHECKING:
    from graftlm.adapters.server.app import Server
    from graftlm.core.request import Request

_FAMILY = "graftlm"
"""The family in Ollama's descriptions: clients read the context's length under its name."""

register_form("/v1/messages", messages.error_object)
register_form("/api/", ollama.error_object)


def dialect_routes(server: Server) -> list[Route]:
    """Return the routes of OpenAI's responses, Anthropic's messages and Ollama's API."""
    responses, anthropic, local = Responses(server), Messages(server), Ollama(server)
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route(one, responses.retrieve, methods=["GET"]),
        Route(one, responses.delete, methods=["DELETE"]),
        Route(f"{one}/cancel", responses.cancel, methods=["POST"]),
        Route(f"{one}/input_items", responses.input_items, methods=["GET"]),
        Route("/v1/messages", anthropic.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", anthropic.count, methods=["POST"]),
        Route("/api/chat", local.chat, methods=["POST"]),
        Route("/api/generate", local.generate, methods=["POST"]),
        Route("/api/tags", local.tags, methods=["GET"]),
        Route("/api/ps", local.tags, methods=["GET"]),
        Route("/api/show", local.show, methods=["POST"]),
        Route("/api/version", local.version, methods=["GET"]),
    ]


def _translated(make: Callable[[], Any], fields: Mapping[str, str]) -> Any:
    """Return a translated body. Raises ApiError for a body that a chat request cannot express."""
    try:
        return make()
    except GraftError as error:
        raise api_error(error, fields) from error
    except ValidationError as error:
        raise invalid_body(error, ChatBody.model_fields) from error


class Responses:
    """The routes of `/v1/responses`. Responses are kept in memory unless `store` is false."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.store = ResponseStore()
        self._running: set[asyncio.Task[None]] = set()

    async def create(self, http: HttpRequest) -> Response:
        server = self._server
        body = await server.read(http, ResponsesBody)
        caller, fields = _caller(http), field_names(ResponsesBody, "max_output_tokens")
        if body.background and (body.stream or body.store is False):
            raise ApiError(400, "background needs stream=false and store=true", param="background")
        before = self._history(body, caller)
        chat = _translated(lambda: body.to_chat(before), fields)
        _ignored(http, body.read_tools.ignored)
        request, form, _ = await server.prepared(chat, fields)
        items = (
            [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        )
        stored = Stored(caller, {}, [*before, *body.to_messages()], items)
        keep = partial(self._keep, stored) if body.store is not False else _ignore
        writer = ResponseWriter(body, body.model or server.model_names[0], form, request, keep)
        answer = server.submit([request])
        if body.background:
            stored.answer = answer
            self._keep(stored, writer.status("queued"))
            task = asyncio.create_task(self._run(stored, writer))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return JSONResponse(stored.response)
        return EventStream(answer, writer, fields) if body.stream else WholeAnswer(answer, writer, fields)

    def _history(self, body: ResponsesBody, caller: str) -> list[dict[str, Any]]:
        """Return the messages of the conversation that the request continues."""
        if body.previous_response_id is None:
            return []
        stored = self.store.get(body.previous_response_id, caller)
        if stored.answer is not None:
            message = f"the response {body.previous_response_id!r} still runs; wait until it has completed"
            raise ApiError(400, message, param="previous_response_id")
        return [*stored.messages, *output_messages(stored.response["output"])]

    def _keep(self, stored: Stored, response: dict[str, Any]) -> None:
        stored.response = response
        if not stored.deleted:
            self.store.put(response["id"], stored)

    async def _run(self, stored: Stored, writer: ResponseWriter) -> None:
        """Run a response in the background; its status is kept."""
        assert stored.answer is not None
        try:
            writer.whole(await stored.answer.completions())
        except RequestCancelled:
            self._keep(stored, writer.status("cancelled"))
        except Exception as error:
            writer.failed(api_error(error))
        finally:
            stored.answer = None

    async def retrieve(self, http: HttpRequest) -> Response:
        return JSONResponse(self._stored(http).response)

    async def delete(self, http: HttpRequest) -> Response:
        stored, response_id = self._stored(http), http.path_params["response_id"]
        stored.deleted = True
        if stored.answer is not None:
            stored.answer.cancel()
        self.store.drop(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: HttpRequest) -> Response:
        stored = self._stored(http)
        if not stored.response["background"]:
            raise ApiError(400, "only a response with background=true can be cancelled; close the connection instead")
        if stored.answer is not None:
            stored.answer.cancel()
            stored.response = {**stored.response, "status": "cancelled"}
        return JSONResponse(stored.response)

    async def input_items(self, http: HttpRequest) -> Response:
        stored = self._stored(http)
        items = [{"id": f"item_{index}", **item} for index, item in enumerate(stored.items)]
        ends = (
            {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
        )
        return JSONResponse({"object": "list", "data": items, **ends, "has_more": False})

    def _stored(self, http: HttpRequest) -> Stored:
        return self.store.get(http.path_params["response_id"], _caller(http))


class Messages:
    """The routes of `/v1/messages`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def create(self, http: HttpRequest) -> Response:
        server = self._server
        body = await server.read(http, MessagesBody)
        fields = field_names(MessagesBody)
        _ignored(http, body.ignored)
        request, form, _ = await server.prepared(_translated(body.to_chat, fields), fields)
        writer = MessageWriter(
            f"msg_{secrets.token_hex(12)}", body.model or server.model_names[0], form, request.thinking
        )
        return _answer(server, request, writer, fields, streams=bool(body.stream))

    async def count(self, http: HttpRequest) -> Response:
        body = await self._server.read(http, CountBody)
        fields = field_names(CountBody)
        messages, tools = _translated(body.to_messages, fields), _translated(body.to_tools, fields)
        chat = _translated(lambda: ChatBody(messages=messages, tools=tools), fields)
        request, _, _ = await self._server.prepared(chat, fields)
        processor = self._server.runtime.processor
        encoded = await self._server.run(partial(processor.encode, request.prompt, request.tools), apart=True)
        return JSONResponse({"input_tokens": len(encoded.ids)})


class Ollama:
    """The routes of Ollama's API."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def chat(self, http: HttpRequest) -> Response:
        return await self._generate(http, OllamaChatBody)

    async def generate(self, http: HttpRequest) -> Response:
        return await self._generate(http, GenerateBody)

    async def _generate(self, http: HttpRequest, kind: type[OllamaChatBody] | type[GenerateBody]) -> Response:
        server = self._server
        body = await server.read(http, kind)
        fields, is_chat = field_names(kind, "options.num_predict"), kind is OllamaChatBody
        chat, name = _translated(body.to_chat, fields), body.model or server.model_names[0]
        if chat is None:
            return JSONResponse(OllamaWriter(name, None, chat=is_chat).loaded())
        request, form, _ = await server.prepared(chat, fields)
        return _answer(
            server, request, OllamaWriter(name, form, request.thinking, chat=is_chat), fields, streams=body.streams
        )

    def _card(self, name: str) -> dict[str, Any]:
        server = self._server
        level = server.runtime.stats().weights
        details = {"format": "safetensors", "family": _FAMILY, "families": [_FAMILY], "parent_model": ""}
        details |= {"parameter_size": "", "quantization_level": level}
        return {"name": name, "model": name, "size": 0, "digest": "", "details": details}

    async def tags(self, http: HttpRequest) -> Response:
        loaded = {"modified_at": "1970-01-01T00:00:00Z", "expires_at": "9999-12-31T00:00:00Z", "size_vram": 0}
        return JSONResponse({"models": [{**self._card(name), **loaded} for name in self._server.model_names]})

    async def show(self, http: HttpRequest) -> Response:
        body = await self._server.read(http, ollama.ShowBody)
        server = self._server
        name = body.model or body.name or server.model_names[0]
        template = str(getattr(server.runtime.tokenizer.hf, "chat_template", None) or "")
        info = {"general.architecture": _FAMILY, f"{_FAMILY}.context_length": server.runtime.max_model_len}
        card = {"details": self._card(name)["details"], "model_info": info, "capabilities": abilities(server.runtime)}
        return JSONResponse({"modelfile": f"FROM {name}", "parameters": "", "template": template, **card})

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": graftlm.__version__})


def _answer(
    server: Server, request: Request, writer: Writer, fields: Mapping[str, str], *, streams: bool
) -> EventStream | WholeAnswer:
    answer = server.submit([request])
    return EventStream(answer, writer, fields) if streams else WholeAnswer(answer, writer, fields)


def _caller(http: HttpRequest) -> str:
    """Return the namespace of the caller's API key."""
    return access_of(http.scope).namespace


def _ignored(http: HttpRequest, paths: Sequence[str]) -> None:
    """Add paths of the body to those that the header and the log list as ignored."""
    record = access_of(http.scope)
    record.ignored = (*record.ignored, *paths)[:MAX_IGNORED]


def _ignore(response: dict[str, Any]) -> None:
    """Keep nothing: `store` is false."""
