"""Whole batches for LangChain: the requests of a group are handed over together, the calls then run as always.

LangChain shows a chat model one conversation at a time; only `batch`, `abatch`, `generate` and their kin see the
whole list. Here they submit all requests at once and then let LangChain make its calls, with their callbacks, run
ids, tags and configs. A call of which nothing is seen but its answer is not made by LangChain at all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from contextvars import copy_context
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
"""Threads that wait for the answers of one `batch`; the engine's batch is as large as the list, whatever this is."""


def _distinct(configs: Sequence[RunnableConfig]) -> list[Any]:
    """The callbacks of a batch's calls, those without a handler taken as one."""
    given = [config.get("callbacks") for config in configs]
    with_handlers = {id(c): c for c in given if c and (not isinstance(c, BaseCallbackManager) or c.handlers)}
    return [None, *with_handlers.values()]


def _handlers(callbacks: Any, model: BaseChatModel) -> list[Any]:
    """All that would observe a call, tracers of the context and global switches included."""
    return CallbackManager.configure(callbacks, model.callbacks, model.verbose).handlers


def _is_plain(call: Call) -> bool:
    """Whether it asks for one answer to texts: LangChain rewrites messages with images before a model sees them."""
    return call.request.sampling.n == 1 and all(isinstance(message.content, str) for message in call.request.prompt)


def _named(message: AIMessage, config: RunnableConfig) -> AIMessage:
    """The message with the id that LangChain gives it: that of its run."""
    message.id = f"{LC_ID_PREFIX}-{config.get('run_id') or uuid7()}-0"
    return message


def _cancel(futures: Iterable[Future[Completion]]) -> None:
    """Free what has not ended, when the wait for it is over."""
    for future in futures:
        future.cancel()


class GroupedChatModel(BaseChatModel):
    """A chat model whose `batch`, `abatch`, `generate`, `agenerate` and their kin hand the whole list over at once.

    LLM caches, rate limiters, streaming callbacks and `max_concurrency` keep their meaning: with them, requests are
    submitted as LangChain makes its calls. Where no callback, tracer or subclass observes a call, alone or in a batch,
    the message that it would return is built without making it.
    """

    @abstractmethod
    def _message(self, call: Call, completion: Completion, options: dict[str, Any]) -> AIMessage:
        """The message that `invoke` returns for a call, but for its id."""

    @abstractmethod
    def _prepare(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Call:
        """Turn one call into its request. Raises what the call itself would raise."""

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        own = ensure_config(config)
        if (call := self._unobserved_call(input, own, stop, kwargs)) is None:
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
        if (call := self._unobserved_call(input, own, stop, kwargs)) is None:
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
        if (calls := self._unobserved_calls(inputs, config, kwargs)) is not None:
            futures = calls[0].runtime.submit_many([call.request for call in calls])
            try:
                wait(futures, return_when=ALL_COMPLETED if return_exceptions else FIRST_EXCEPTION)
                return self._messages(calls, futures, config, kwargs, return_exceptions=return_exceptions)
            finally:
                _cancel(futures)
        group, configs = self._group_inputs(inputs, config, kwargs, async_api=False)
        with laid_out(group):
            if len(group) < len(inputs) or len(inputs) < 2:
                return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)
            # All run already: threads would only wait, and threads that wait for one engine take turns as it is.
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
        if (calls := self._unobserved_calls(inputs, config, kwargs)) is not None:
            futures = calls[0].runtime.submit_many([call.request for call in calls])
            try:
                await loop_batching.settled(futures, until_error=not return_exceptions)
                return self._messages(calls, futures, config, kwargs, return_exceptions=return_exceptions)
            finally:
                _cancel(futures)
        group, configs = self._group_inputs(inputs, config, kwargs, async_api=True)
        with laid_out(group):
            return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _unobserved_calls(self, inputs: Sequence[LanguageModelInput], config: Any, kwargs: Any) -> list[Call] | None:
        """The calls of a batch of which nothing is seen but the answers; None where LangChain has to make them."""
        if len(inputs) < 2:
            return None
        configs = get_config_list(config, len(inputs))
        options = dict(kwargs)
        stop = options.pop("stop", None)
        if configs[0].get("max_concurrency") is not None or not self._unobserved(_distinct(configs), options):
            return None
        calls = [call for call in self._prepared(inputs, stop, options) if _is_plain(call)]
        return calls if len(calls) == len(inputs) else None

    def _unobserved_call(self, item: Any, config: RunnableConfig, stop: list[str] | None, kwargs: Any) -> Call | None:
        """The one call of `invoke`, likewise."""
        if laid_out_group.get() is not None or not self._unobserved([config.get("callbacks")], kwargs):
            return None
        call = next(self._prepared((item,), stop, kwargs), None)
        return call if call is not None and _is_plain(call) else None

    def _unobserved(self, callbacks: Sequence[Any], options: dict[str, Any]) -> bool:
        """Whether no callback, tracer, cache, stream, limit or subclass takes part in calls with these callbacks."""
        return not (
            type(self).__module__ != "graftlm.adapters.langchain.chat_model"
            or self.rate_limiter is not None
            or self.output_version == "v1"
            or self._looks_into_cache()
            or any(_handlers(one, self) for one in callbacks)
            or self._should_stream(async_api=False, **options)
        )

    def _messages(
        self,
        calls: list[Call],
        futures: list[Future[Completion]],
        config: Any,
        options: Any,
        *,
        return_exceptions: bool,
    ) -> list[Any]:
        """What `invoke` would return for each call, all of which have ended, or raise for the first that failed."""
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
        group, configs = self._group_inputs(inputs, config, kwargs, async_api=False)
        items = super().batch_as_completed(inputs, configs, **kwargs)
        context = copy_context()  # the caller's context goes on between two items
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
        group, configs = self._group_inputs(inputs, config, kwargs, async_api=True)
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

    def _group_inputs(
        self, inputs: Sequence[LanguageModelInput], config: Any, kwargs: dict[str, Any], *, async_api: bool
    ) -> tuple[Group, Any]:
        """Submit the inputs of a batch; its configs, with room for all of them at once."""
        configs = get_config_list(config, len(inputs)) if inputs else []
        if len(inputs) < 2 or configs[0].get("max_concurrency") is not None or self.rate_limiter is not None:
            return Group(), config
        options = {name: value for name, value in kwargs.items() if name != "return_exceptions"}
        stop = options.pop("stop", None)
        group = Group()
        if self._knows_its_calls([c.get("callbacks") for c in configs], options, async_api=async_api):
            group = Group.submit(self._prepared(inputs, stop, options))
        if not async_api:
            configs = [{**c, "max_concurrency": min(len(inputs), MAX_THREADS)} for c in configs]
        return group, configs

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
        if self.rate_limiter or not self._knows_its_calls([callbacks], options, async_api=async_api):
            return Group()
        return Group.submit(self._prepared(messages, stop, options))

    def _prepared(
        self, inputs: Iterable[LanguageModelInput], stop: list[str] | None, options: dict[str, Any]
    ) -> Iterator[Call]:
        """The calls that can be made; one that cannot raises its own error when LangChain makes it."""
        for item in inputs:
            with suppress(Exception):
                yield self._prepare(self._convert_input(item).to_messages(), stop, dict(options))

    def _knows_its_calls(self, callbacks: list[Any], options: dict[str, Any], *, async_api: bool) -> bool:
        """Whether every call will reach the engine, and not a cache or a stream."""
        if self._looks_into_cache():
            return False
        for handlers in callbacks[:1] if all(c is callbacks[0] for c in callbacks) else callbacks:
            manager: Any = CallbackManager.configure(handlers, self.callbacks)
            if self._should_stream(async_api=async_api, run_manager=manager, **options):
                return False
            if self._should_use_protocol_streaming(async_api=async_api, run_manager=manager, **options):
                return False
        return True

    def _looks_into_cache(self) -> bool:
        return bool(self.cache) or (self.cache is None and get_llm_cache() is not None)
