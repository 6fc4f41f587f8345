"""Server: the routes over one runtime, as an ASGI application."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from graftlm.adapters.server.access import access_of, current, shown
from graftlm.adapters.server.bodies import SMALL_BYTES, AnyBody, Bodies
from graftlm.adapters.server.dialects.routes import dialect_routes
from graftlm.adapters.server.embeddings.routes import Embeddings
from graftlm.adapters.server.endpoints.body import Body
from graftlm.adapters.server.endpoints.chat import ChatBody, ChatWriter
from graftlm.adapters.server.endpoints.completions import CompletionBody, CompletionWriter
from graftlm.adapters.server.endpoints.info import info_routes
from graftlm.adapters.server.endpoints.openapi import openapi_routes
from graftlm.adapters.server.endpoints.page import History, page_routes
from graftlm.adapters.server.endpoints.tokens import token_routes
from graftlm.adapters.server.gate import Gate
from graftlm.adapters.server.http.errors import ApiError, api_error, field_names
from graftlm.adapters.server.http.responses import EventStream, WholeAnswer, Writer
from graftlm.adapters.server.http.wire import Envelope
from graftlm.adapters.server.intake import Answer, Intake
from graftlm.adapters.server.media import Media, holds_media
from graftlm.adapters.server.metrics import Metrics
from graftlm.adapters.server.settings import ServerSettings
from graftlm.core.errors import ConfigError, GraftError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from graftlm.adapters.server.embeddings.model import EmbeddingModel
    from graftlm.adapters.server.endpoints.prompt_fields import PromptScore
    from graftlm.core.chat.tool_format import ToolFormat
    from graftlm.core.request import Request
    from graftlm.core.runtime import Runtime

    Prepared = tuple[Request, ToolFormat | None, PromptScore | None]

Result = TypeVar("Result")


class Server:
    """An ASGI application over one runtime.

    draining             True: new requests get status 503, running ones continue.
    sends_outside_tasks  True if `send` may be called from a callback of the loop, as with uvicorn.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: ServerSettings | None = None,
        *,
        embedding_model: EmbeddingModel | None = None,
    ) -> None:
        self.runtime = runtime
        self.settings = settings or ServerSettings()
        named = self.settings.model_names or (runtime.model_name,)
        self.model_names = tuple(dict.fromkeys((*named, *self.settings.model_aliases)))
        self.draining = self.sends_outside_tasks = False
        self.intake: Intake | None = None
        self.bodies = Bodies(self.settings)
        self.media = Media(runtime, self.settings)
        self.metrics = Metrics(runtime, self.model_names[0])
        self._history = History(self)
        self.embeddings = Embeddings(self, embedding_model)
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            *dialect_routes(self),
            *info_routes(self),
            *token_routes(self),
            *page_routes(self, self._history),
            *openapi_routes(self),
            *self.embeddings.routes(),
        ]
        handlers: Any = {ApiError: _answer_error, HTTPException: _answer_route, ClientDisconnect: _answer_nobody}
        app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)
        self._gate = Gate(app, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gate(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.intake = Intake(self.runtime, self.metrics)
        keeper = asyncio.create_task(self._history.keep())
        yield
        keeper.cancel()
        self.intake.close()

    @property
    def num_open(self) -> int:
        """The number of generating HTTP requests that arrive, wait or run."""
        return self._gate.num_open

    def unavailable(self) -> str | None:
        """Return the reason for refusing new requests; None while the server accepts them."""
        if self.draining:
            return "the server is shutting down"
        return self.runtime.unavailable(self.settings.max_step_s)

    # -- generation ------------------------------------------------------------------------------------------------

    async def chat(self, http: HttpRequest) -> Response:
        body = await self.read(http, ChatBody)
        request, form, score = await self.prepared(body, field_names(ChatBody, body.limit_name))
        envelope = self._envelope(http, body, "chatcmpl", "chat.completion.chunk")
        scored = [] if score is None else [score.request]
        writer = ChatWriter(body, envelope, form, request.thinking, None if score is None else score.logprobs)
        return self._answer([request, *scored], writer, body)

    async def prepared(self, body: ChatBody, fields: Mapping[str, str]) -> Prepared:
        """Return the native request, the format of its calls and the score of its prompt. Raises ApiError.

        fields  names of the fields of the body that came, for the field at fault
        """
        try:
            body.check(self.settings.limits)
            if body.chat_template is not None and not self.settings.trust_request_chat_template:
                raise ConfigError(
                    "chat_template of a request is a program; start the server with --trust-request-chat-template"
                )
            if holds_media(body.messages):
                return (*await self.media.prepared(body), None)
            return await self.run(partial(body.convert, self.runtime), apart=body.slow)
        except GraftError as error:
            raise api_error(error, fields) from error

    async def complete(self, http: HttpRequest) -> Response:
        body = await self.read(http, CompletionBody)
        try:
            body.check(self.settings.limits)
            calls = await self.run(partial(body.to_calls, self.runtime), apart=body.needs_ids)
        except GraftError as error:
            raise api_error(error, field_names(CompletionBody)) from error
        envelope = self._envelope(http, body, "cmpl", "text_completion")
        writer = CompletionWriter(body, envelope, calls, self.runtime)
        return self._answer(writer.requests, writer, body)

    def _answer(self, requests: list[Request], writer: Writer, body: Body) -> Response:
        fields = field_names(type(body), body.limit_name)
        answer = self.submit(requests)
        return EventStream(answer, writer, fields) if body.stream else WholeAnswer(answer, writer, fields)

    def submit(self, requests: list[Request]) -> Answer:
        """Queue the requests of one HTTP request. Raises ApiError if too many sequences are open."""
        assert self.intake is not None
        most, num = self.settings.limits.open_sequences, sum(request.sampling.n for request in requests)
        if self.intake.num_sequences + num > most and self.intake.open:
            message = f"{self.intake.num_sequences:,} sequences are open, the server takes {most:,}; try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="too_many_sequences", retry_after=1)
        access, timeout_s = current(), self.settings.request_timeout_s
        for request in requests:
            request.owner = access.caller, access.id
            given_s = request.sampling.timeout
            if timeout_s is not None and (given_s is None or given_s > timeout_s):
                request.sampling = replace(request.sampling, timeout=timeout_s)
        return self.intake.submit(requests)

    def _envelope(self, http: HttpRequest, body: Body, prefix: str, name: str) -> Envelope:
        number = current().id or secrets.token_hex(12)
        return Envelope(f"{prefix}-{number}", body.model or self.model_names[0], name, body.with_usage)

    async def read(self, http: HttpRequest, kind: type[AnyBody]) -> AnyBody:
        """Return the validated body of a request, within the limits. Raises ApiError that names the field at fault."""
        body = await self.bodies.read(http, kind)
        name = getattr(body, "model", None)
        given_id = getattr(body, "request_id", None) if isinstance(body, Body) else None
        current().id = given_id or current().id
        current().model = name or self.model_names[0]
        if name is not None and str(name).removesuffix(":latest") not in self.model_names:
            names = ", ".join(self.model_names)
            message = f"the model {name!r} does not exist here; use {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return body

    async def run(self, call: Callable[[], Result], *, apart: bool = False) -> Result:
        """Run a conversion of the current body: on the loop if the body is small, else on a thread.

        apart  True for a conversion that takes long whatever the body's size
        """
        if not apart and current().num_bytes <= SMALL_BYTES:
            return call()
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(self.bodies.converters, context.run, call)


async def _answer_error(http: HttpRequest, error: ApiError) -> Response:
    access_of(http.scope).reason = error.error["code"] or error.error["param"] or error.error["type"] or ""
    return Response(error.body(http.url.path), error.status, error.headers, "application/json")


async def _answer_route(http: HttpRequest, error: HTTPException) -> Response:
    """Return status 404 for an unknown path, with the known ones; 405 for an unknown method."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{http.method} {shown(http.url.path)}: {error.detail}"
    if error.status_code == 404:
        paths = sorted({route.path for route in http.app.routes})
        message += f"; the server has {', '.join(paths)}"
    told = ApiError(error.status_code, message, code=code)
    access_of(http.scope).reason = code or ""
    return Response(told.body(http.url.path), told.status, error.headers, "application/json")


async def _answer_nobody(http: HttpRequest, error: ClientDisconnect) -> Response:
    access_of(http.scope).note_gone()
    return Response(status_code=499)
