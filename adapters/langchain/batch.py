"""Whole batches for LangChain: the requests of a group are handed over together, the calls then run as always.

LangChain shows a chat model one conversation at a time; only `batch`, `abatch`, `generate` and their kin see the
whole list. Here they submit all requests at once and then let LangChain make its calls, with their callbacks, run
ids, tags and configs. Each call looks for its request among those laid out in its context and finds it running
already. What nobody claims is cancelled, so a wrong guess costs work and never changes an answer.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import BaseCallbackManager, CallbackManager
from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import LC_ID_PREFIX, AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list
from langchain_core.utils.uuid import uuid7

from graftlm.adapters.langchain.errors import langchain_errors
from graftlm.core.chat.messages import Message
from graftlm.core.errors import GraftError
from graftlm.core.request import Completion, Request
from graftlm.core.runtime import Runtime
from graftlm.core.serving import loop_batching

MAX_THREADS = 128
"""Threads that wait for the answers of one `batch`; the engine's batch is as large as the list, whatever this is."""


@dataclass(frozen=True)
class Call:
    """A request, and the runtime that answers it under the name `model_name`."""

    runtime: Runtime
    request: Request
    model_name: str

    @property
    def key(self) -> Hashable:
        """Equal for equal prompts; not the other way round."""
        prompt = self.request.prompt
        return prompt if isinstance(prompt, str) else tuple(map(_message_key, prompt))

    def same_as(self, other: Call) -> bool:
        mine, theirs = self.request, other.request
        return (
            self.runtime is other.runtime
            and mine.prompt == theirs.prompt
            and mine.sampling == theirs.sampling
            and (mine.tools, mine.tool_fields) == (theirs.tools, theirs.tool_fields)
        )


def _message_key(message: Message) -> Hashable:
    return (message.role, message.content if isinstance(message.content, str) else len(message.content))


@dataclass
class Group:
    """Calls that were submitted together, waiting to be claimed."""

    waiting: dict[Hashable, list[tuple[Call, Future[Completion]]]] = field(default_factory=dict)

    @classmethod
    def submit(cls, calls: Iterable[Call]) -> Group:
        """Hand all calls over, those of one runtime at once."""
        group = cls()
        by_runtime: dict[int, list[Call]] = {}
        for call in calls:
            by_runtime.setdefault(id(call.runtime), []).append(call)
        for same in by_runtime.values():
            try:
                futures = same[0].runtime.submit_many([call.request for call in same])
            except GraftError:
                continue  # each call will submit its own request and raise its own error
            for call, future in zip(same, futures, strict=True):
                group.waiting.setdefault(call.key, []).append((call, future))
        return group

    def __len__(self) -> int:
        """Calls that were submitted and not claimed yet."""
        return sum(map(len, self.waiting.values()))

    def claim(self, call: Call) -> Future[Completion] | None:
        """The answer to be of a call like this one; each is claimed once."""
        candidates = self.waiting.get(call.key, ())
        for candidate in tuple(candidates):
            if candidate[0].same_as(call):
                try:
                    self.waiting[call.key].remove(candidate)
                except ValueError:  # another thread was faster
                    continue
                return candidate[1]
        return None

    def cancel(self) -> None:
        """Free what nobody claimed."""
        for candidates in self.waiting.values():
            for _, future in candidates:
                future.cancel()


_group: ContextVar[Group | None] = ContextVar("graftlm_langchain_group", default=None)


def _claim(call: Call) -> Future[Completion] | None:
    group = _group.get()
    return group.claim(call) if group is not None else None


def submit_all(calls: Sequence[Call]) -> list[Future[Completion]]:
    """Claim the answer of a request laid out in this context, or submit `calls`, all of one runtime, now."""
    if len(calls) == 1 and (claimed := _claim(calls[0])) is not None:
        return [claimed]
    return calls[0].runtime.submit_many([call.request for call in calls]) if calls else []


async def acomplete(call: Call) -> Completion:
    """The answer of a request laid out in this context, or of `call`, submitted with others of the loop's turn."""
    claimed = _claim(call)
    if claimed is not None:
        return await asyncio.wrap_future(claimed)
    return await loop_batching.complete(call.runtime, call.request)


@contextmanager
def laid_out(group: Group) -> Iterator[None]:
    """Let the calls made in this context claim from `group`."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)
        group.cancel()


def _distinct(configs: Sequence[RunnableConfig]) -> list[Any]:
    """The callbacks of a batch's calls, those without a handler taken as one."""
    given = [config.get("callbacks") for config in configs]
    with_handlers = {id(c): c for c in given if c and (not isinstance(c, BaseCallbackManager) or c.handlers)}
    return [None, *with_handlers.values()]


def _handlers(callbacks: Any, model: BaseChatModel) -> list[Any]:
    """All that would observe a call, tracers of the context and global switches included."""
    return CallbackManager.configure(callbacks, model.callbacks, model.verbose).handlers


def _is_text(call: Call) -> bool:
    """Whether all contents are text: LangChain rewrites those with images before a model sees them."""
    return all(isinstance(message.content, str) for message in call.request.prompt)


def _cancel(futures: Iterable[Future[Completion]]) -> None:
    """Free what has not ended, when the wait for it is over."""
    for future in futures:
        future.cancel()


class GroupedChatModel(BaseChatModel):
    """A chat model whose `batch`, `abatch`, `generate`, `agenerate` and their kin hand the whole list over at once.

    LLM caches, rate limiters, streaming callbacks and `max_concurrency` keep their meaning: with them, requests are
    submitted as LangChain makes its calls. Where no callback, tracer or subclass observes the calls of a batch, the
    messages that they would return are built without making them.
    """

    @abstractmethod
    def _message(self, call: Call, completion: Completion, options: dict[str, Any]) -> AIMessage:
        """The message that `invoke` returns for a call, but for its id."""

    @abstractmethod
    def _prepare(self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Call:
        """Turn one call into its request. Raises what the call itself would raise."""

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
        """The calls of a batch of which nothing is seen but the answers; None where LangChain has to make them.

        It has to where a callback, a tracer, a cache, a limit or a subclass takes part, or a call cannot be prepared.
        """
        if len(inputs) < 2 or type(self).__module__ != "graftlm.adapters.langchain.chat_model":
            return None
        configs = get_config_list(config, len(inputs))
        if configs[0].get("max_concurrency") is not None or self.rate_limiter is not None:
            return None
        options = dict(kwargs)
        stop = options.pop("stop", None)
        if self.output_version == "v1" or any(_handlers(c, self) for c in _distinct(configs)):
            return None
        if not self._knows_its_calls([None], options, async_api=False):
            return None
        calls = list(self._prepared(inputs, stop, options))
        if len(calls) < len(inputs) or any(call.request.sampling.n > 1 or not _is_text(call) for call in calls):
            return None
        return calls

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
                message.id = f"{LC_ID_PREFIX}-{own.get('run_id') or uuid7()}-0"
                answers.append(message)
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
        context.run(_group.set, group)
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
            token = _group.set(group)
            try:
                item = await anext(items, None)  # its tasks start here, with copies of the context
            finally:
                _group.reset(token)
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
        if self.cache or (self.cache is None and get_llm_cache() is not None):
            return False
        for handlers in callbacks[:1] if all(c is callbacks[0] for c in callbacks) else callbacks:
            manager: Any = CallbackManager.configure(handlers, self.callbacks)
            if self._should_stream(async_api=async_api, run_manager=manager, **options):
                return False
            if self._should_use_protocol_streaming(async_api=async_api, run_manager=manager, **options):
                return False
        return True
