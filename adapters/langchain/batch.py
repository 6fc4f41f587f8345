"""Batches for LangChain: all requests of a batch are submitted at once, then LangChain makes its calls.

LangChain passes one conversation at a time to a chat model; only `batch`, `abatch`, `generate` and their variants have
the whole list. They submit all requests and then let LangChain make its calls, with their callbacks, run ids, tags and
configs. A call without an observer is answered without LangChain's call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from contextvars import copy_context
from enum import Enum
from typing import Any

from langchain_core.callbacks import BaseCallbackManager, CallbackManager
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import LC_ID_PREFIX, AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config, get_config_list
from langchain_core.utils.uuid import uuid7

from graftlm.adapters.langchain.errors import langchain_errors
from graftlm.adapters.langchain.group import Call, Group, acomplete, complete, laid_out, laid_out_group
from graftlm.core.request import Completion
from graftlm.core.serving import loop_batching

MAX_THREADS = 128
"""Threads that wait for the answers of one `batch`; the engine's batch is not limited by it."""


class Route(Enum):
    """The path of a call to the engine.

    DIRECT   no callback, tracer, cache, stream, limit or subclass takes part: the message is built here
    GROUPED  LangChain makes the call, whose request was submitted with the others of its batch
    ALONE    LangChain makes the call, which submits its own request: a cache, a stream or a limit may come before
    """

    DIRECT = 1
    GROUPED = 2
    ALONE = 3


def _distinct(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks of a batch's calls, with one None for all calls without a handler."""
    with_handlers = {id(c): c for c in callbacks if c and (not isinstance(c, BaseCallbackManager) or c.handlers)}
    return [None, *with_handlers.values()]


def _is_plain(call: Call) -> bool:
    """Return True for one answer to texts: LangChain rewrites messages with images before a model gets them."""
    prompt = call.request.prompt
    texts = isinstance(prompt, str) or all(isinstance(message.content, str) for message in prompt)
    return call.request.sampling.n == 1 and texts


def _named(message: AIMessage, config: RunnableConfig) -> AIMessage:
    """Set the id that LangChain gives to the message of a run."""
    message.id = f"{LC_ID_PREFIX}-{config.get('run_id') or uuid7()}-0"
    return message


def _cancel(futures: Iterable[Future[Completion]]) -> None:
    """Cancel requests that have not ended; an ended one is not affected."""
    for future in futures:
        future.cancel()


class GroupedChatModel(BaseChatModel):
    """A chat model whose `batch`, `abatch`, `generate`, `agenerate` and their variants submit the whole list at once.

    LLM caches, rate limiters, streaming callbacks and `max_concurrency` keep their meaning: with them, requests are
    submitted as LangChain makes its calls. `_route` decides, once for a call or a batch.
    """

    @abstractmethod
    def _message(self, call: Call, completion: Completion, options: dict[str, Any]) -> AIMessage:
        """Build the message that `invoke` returns for a call, without its id."""

    @abstractmethod
    def _prepare(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Call:
        """Turn one call into its request. Raises: the errors of the call itself."""

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        own = ensure_config(config)
        if (call := self._direct_call(input, own, stop, kwargs)) is None:
            return super().invoke(input, config, stop=stop, **kwargs)
        with langchain_errors():
            return _named(self._message(call, complete(call), kwargs), own)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        own = ensure_config(config)
        if (call := self._direct_call(input, own, stop, kwargs)) is None:
            return await super().ainvoke(input, config, stop=stop, **kwargs)
        with langchain_errors():
            return _named(self._message(call, await acomplete(call), kwargs), own)

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        calls, group, configs = self._planned(inputs, config, kwargs, async_api=False)
        if calls is not None:
            futures = calls[0].runtime.submit_many([call.request for call in calls])
            try:
                wait(futures, return_when=ALL_COMPLETED if return_exceptions else FIRST_EXCEPTION)
                return self._messages(calls, futures, config, kwargs, return_exceptions=return_exceptions)
            finally:
                _cancel(futures)
        with laid_out(group):
            if len(group) < len(inputs) or len(inputs) < 2:
                return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)
            # All requests run already: more threads would only wait for the engine.
            answers: list[Any] = []
            for item, own in zip(inputs, get_config_list(config, len(inputs)), strict=True):
                try:
                    answers.append(copy_context().run(self.invoke, item, own, **kwargs))
                except Exception as error:
                    if not return_exceptions:
                        raise
                    answers.append(error)
            return answers

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        calls, group, configs = self._planned(inputs, config, kwargs, async_api=True)
        if calls is not None:
            futures = calls[0].runtime.submit_many([call.request for call in calls])
            try:
                await loop_batching.settled(futures, until_error=not return_exceptions)
                return self._messages(calls, futures, config, kwargs, return_exceptions=return_exceptions)
            finally:
                _cancel(futures)
        with laid_out(group):
            return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _route(self, callbacks: Sequence[Any], options: dict[str, Any], *, async_api: bool) -> Route:
        """Choose the route of calls with these callbacks; tracers of the context and global switches count."""
        if self.rate_limiter is not None or self.cache or (self.cache is None and get_llm_cache() is not None):
            return Route.ALONE
        managers = [CallbackManager.configure(one, self.callbacks, self.verbose) for one in _distinct(callbacks)]
        observers: list[Any] = [manager for manager in managers if manager.handlers]
        for manager in observers or [None]:
            if self._should_stream(async_api=async_api, run_manager=manager, **options):
                return Route.ALONE
            if self._should_use_protocol_streaming(async_api=async_api, run_manager=manager, **options):
                return Route.ALONE
        is_own = type(self).__module__ == "graftlm.adapters.langchain.chat_model" and self.output_version != "v1"
        return Route.DIRECT if is_own and not observers else Route.GROUPED

    def _direct_call(self, item: Any, config: RunnableConfig, stop: list[str] | None, kwargs: Any) -> Call | None:
        """Return the call of `invoke` if it is answered directly; None if LangChain makes it."""
        if laid_out_group.get() is not None:
            return None
        if self._route([config.get("callbacks")], kwargs, async_api=False) is not Route.DIRECT:
            return None
        call = next(self._prepared((item,), stop, kwargs), None)
        return call if call is not None and _is_plain(call) else None

    def _planned(
        self, inputs: Sequence[LanguageModelInput], config: Any, kwargs: dict[str, Any], *, async_api: bool
    ) -> tuple[list[Call] | None, Group, Any]:
        """Return the calls of a batch to answer directly; or None, the submitted group and the configs of its calls.

        The configs of synchronous calls have a thread for each of them.
        """
        configs = get_config_list(config, len(inputs)) if inputs else []
        if len(inputs) < 2 or configs[0].get("max_concurrency") is not None or self.rate_limiter is not None:
            return None, Group(), config
        options = {name: value for name, value in kwargs.items() if name != "return_exceptions"}
        stop = options.pop("stop", None)
        route = self._route([c.get("callbacks") for c in configs], options, async_api=async_api)
        calls = list(self._prepared(inputs, stop, options)) if route is not Route.ALONE else []
        if route is Route.DIRECT and len(calls) == len(inputs) and all(map(_is_plain, calls)):
            return calls, Group(), configs
        if not async_api:
            configs = [{**c, "max_concurrency": min(len(inputs), MAX_THREADS)} for c in configs]
        return None, Group.submit(calls), configs

    def _submitted(self, inputs: Any, config: Any, kwargs: dict[str, Any], *, async_api: bool) -> tuple[Group, Any]:
        """Submit all calls of a batch that LangChain makes; return their group and configs."""
        calls, group, configs = self._planned(inputs, config, kwargs, async_api=async_api)
        return (group if calls is None else Group.submit(calls)), configs

    def _messages(
        self,
        calls: list[Call],
        futures: list[Future[Completion]],
        config: Any,
        options: Any,
        *,
        return_exceptions: bool,
    ) -> list[Any]:
        """Build the messages of ended calls, or raise the first error."""
        failed = None if return_exceptions else next((f for f in futures if f.done() and f.exception()), None)
        answers: list[Any] = []
        for call, future, own in zip(calls, futures, get_config_list(config, len(calls)), strict=True):
            try:
                with langchain_errors():
                    message = self._message(call, (failed or future).result(), options)
                answers.append(_named(message, own))
            except Exception as error:
                if not return_exceptions:
                    raise
                answers.append(error)
        return answers

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        group, configs = self._submitted(inputs, config, kwargs, async_api=False)
        items = super().batch_as_completed(inputs, configs, **kwargs)
        context = copy_context()  # the caller's context changes between two items
        context.run(laid_out_group.set, group)
        try:
            while (item := context.run(next, items, None)) is not None:
                yield item
        finally:
            group.cancel()

    async def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        group, configs = self._submitted(inputs, config, kwargs, async_api=True)
        items = super().abatch_as_completed(inputs, configs, **kwargs)
        try:
            token = laid_out_group.set(group)
            try:
                item = await anext(items, None)  # its tasks start here, with copies of the context
            finally:
                laid_out_group.reset(token)
            while item is not None:
                yield item
                item = await anext(items, None)
        finally:
            group.cancel()

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        if len(messages) < 2:
            return super().generate(messages, stop, callbacks, **kwargs)
        with laid_out(self._group_messages(messages, stop, callbacks, kwargs, async_api=False)):
            return super().generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        if len(messages) < 2:
            return await super().agenerate(messages, stop, callbacks, **kwargs)
        with laid_out(self._group_messages(messages, stop, callbacks, kwargs, async_api=True)):
            return await super().agenerate(messages, stop, callbacks, **kwargs)

    def _group_messages(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None,
        callbacks: Any,
        kwargs: dict[str, Any],
        *,
        async_api: bool,
    ) -> Group:
        options = {n: v for n, v in kwargs.items() if n not in ("tags", "metadata", "run_name", "run_id")}
        if self._route([callbacks], options, async_api=async_api) is Route.ALONE:
            return Group()
        return Group.submit(self._prepared(messages, stop, options))

    def _prepared(
        self, inputs: Iterable[LanguageModelInput], stop: list[str] | None, options: dict[str, Any]
    ) -> Iterator[Call]:
        """Yield the valid calls; an invalid one raises its error when LangChain makes it."""
        for item in inputs:
            with suppress(Exception):
                yield self._prepare(self._convert_input(item).to_messages(), stop, dict(options))
