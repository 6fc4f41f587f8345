"""Runtime: a model and the thread that runs its engine. Any thread and any event loop may submit requests."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, overload

import numpy as np

from graftlm.core.config import EngineConfig, OneConstructor, SamplingOptions, SamplingParams
from graftlm.core.errors import ConfigError, EngineError, GraftError
from graftlm.core.metrics import CacheReport, Stats
from graftlm.core.model.source import ModelSource, check_model
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.source import EndpointSource
from graftlm.core.request import Chunk, Completion, Listener, Request, Score, Submission, Usage, checked, is_batch
from graftlm.core.serving.checked_listener import CheckedListener
from graftlm.core.serving.engine_thread import EngineThread, Held, Pin, waits_of
from graftlm.core.serving.stream import (
    Answer,
    AsyncListener,
    ChunkStream,
    EngineFuture,
    FutureListener,
    StreamListener,
    cancelled_on_error,
    pass_cancel,
    pass_logits,
    results,
)
from graftlm.core.serving.telemetry import TracedListener, traced

if TYPE_CHECKING:
    from graftlm.core.chat.messages import Message
    from graftlm.core.program.compiler.sharing import Suggestion
    from graftlm.core.program.select import Selection
    from graftlm.core.prompt_input import PromptInput
    from graftlm.core.remote.endpoint import Endpoint
    from graftlm.core.semantic_cache.semantic_cache import SemanticCache, SemanticFront
    from graftlm.core.text.processor import Processor
    from graftlm.core.text.tokenizer import Tokenizer

    Prompt = (
        str | Sequence[int] | np.ndarray[Any, Any] | PromptInput | Sequence[Mapping[str, object]] | Sequence[Message]
    )
    """One prompt: text taken as is, token ids, or messages."""

    Prompts = (
        list[str]
        | tuple[str, ...]
        | Sequence[PromptInput]
        | Sequence[Sequence[int]]
        | Sequence[Sequence[Mapping[str, object]]]
        | Sequence[Sequence[Message]]
    )
    """Prompts that are submitted together."""


class SharedRuntimes:
    """Runtimes by their key, each held until it is closed. A forked child starts without any."""

    def __init__(self) -> None:
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._runtimes: dict[Hashable, Runtime] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Runtime]) -> Runtime:
        """Return the open runtime with `key`, made if there is none."""
        with self._lock:
            self._runtimes = {known: runtime for known, runtime in self._runtimes.items() if not runtime.closed}
            if key not in self._runtimes:
                self._runtimes[key] = make()
            return self._runtimes[key]

    def forget(self, closed: Runtime) -> None:
        """Drop a closed runtime, so that its model is freed."""
        with self._lock:
            self._runtimes = {key: runtime for key, runtime in self._runtimes.items() if runtime is not closed}


CONSTRAINT_WAIT_S = 1.0
"""Seconds to wait for the compilation of constraints while weights load, so that an error comes before them."""


_hold_numbers = itertools.count(1)


class Runtime(OneConstructor):
    """A model, ready for requests from anywhere in the process.

    model      a Hugging Face id, a local folder, a GGUF file, "ollama:NAME", "sprout" (the embedded model), or a
               loaded transformers model.
    tokenizer  a Hugging Face tokenizer; None loads the one beside the model.
    base_url   the URL of an OpenAI-compatible API, usually with /v1 at its end, for a model that runs there.
    api_key    its key; None reads GRAFTLM_API_KEY. It is never shown, and not pickled.
    semantic_cache  a SemanticCache: greedy requests get the answers of earlier ones that say nearly the same.
    namespace  of requests without one: KV is shared within a namespace alone.
    options    fields of EngineConfig: device, dtype, attention, max_model_len, max_batch, max_step_tokens,
               cache, schedule, strict, seed, quantization, trust_remote_code, ...; with `base_url` those of
               EndpointConfig: max_in_flight, max_retries, timeout, budget, prices, capabilities, ...

    Construction reads nothing; the first request or `load()` does. Copies are the same runtime.
    """

    _shared: ClassVar[SharedRuntimes] = SharedRuntimes()

    def __init__(
        self,
        model: Any = "sprout",
        *,
        tokenizer: Any = None,
        base_url: str | None = None,
        api_key: str | None = None,
        semantic_cache: SemanticCache | None = None,
        namespace: str = "",
        **options: Any,
    ) -> None:
        self.model = model
        self.namespace = _checked_namespace(namespace)
        self.base_url = base_url
        self.options = options
        self._source: ModelSource | EndpointSource
        if base_url is not None or api_key is not None:
            self.config = EngineConfig()
            config = EndpointConfig.from_options(model, base_url, api_key, options)
            self._source, self.base_url = EndpointSource(config, tokenizer), config.base_url
        else:
            self.config = EngineConfig.from_options(**options)
            check_model(model, self.config)
            self._source = ModelSource(model, tokenizer, self.config)
        self._pid = os.getpid()
        source, batches = self._source, isinstance(self._source, ModelSource)
        self._thread = EngineThread(source.name, source.build_engine, gathers=batches, answers_on=source.answers_on)
        weakref.finalize(self, self._thread.stop)
        self._semantic: SemanticFront | None = None
        if semantic_cache is not None:
            from graftlm.core.semantic_cache.semantic_cache import SemanticFront

            self._semantic = SemanticFront(semantic_cache, weakref.proxy(self))

    @classmethod
    def shared(
        cls,
        model: Any = "sprout",
        *,
        tokenizer: Any = None,
        base_url: str | None = None,
        api_key: str | None = None,
        semantic_cache: SemanticCache | None = None,
        namespace: str = "",
        **options: Any,
    ) -> Runtime:
        """The one runtime of this process for `model` and `options`; closed ones are replaced.

        Those of several namespaces have one engine.
        """
        name = os.fspath(model) if isinstance(model, str | os.PathLike) else id(model)
        key: tuple[Any, ...] = (name, None if tokenizer is None else id(tokenizer), semantic_cache)
        remote = base_url is not None or api_key is not None
        key += (EndpointConfig.key_of(base_url, api_key, options) if remote else EngineConfig.from_options(**options),)
        given = {"tokenizer": tokenizer, "base_url": base_url, "api_key": api_key, "semantic_cache": semantic_cache}
        runtime = cls._shared.get(key, lambda: cls(model, **given, **options))
        if not namespace:
            return runtime
        return cls._shared.get((key, _checked_namespace(namespace)), lambda: runtime.in_namespace(namespace))

    def in_namespace(self, namespace: str) -> Runtime:
        """Return a runtime over the same engine whose requests are of `namespace`; closing either closes both."""
        view: Runtime = object.__new__(type(self))
        view.__dict__ |= self.__dict__ | {"namespace": _checked_namespace(namespace), "_view_of": self._whole}
        return view

    @property
    def _whole(self) -> Runtime:
        """The runtime whose life is the engine's; others are views of it."""
        whole: Runtime = self.__dict__.get("_view_of", self)
        return whole

    # -- life --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> Runtime:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self.model, str | os.PathLike) or self._source.given_tokenizer is not None:
            raise TypeError("a runtime over a loaded model cannot be pickled; pass the model's name or folder instead")
        if "headers" in self.options:
            raise TypeError(
                "a runtime with headers= cannot be pickled, since they may hold keys; build it where it runs"
            )
        if self._semantic is not None:
            raise TypeError("a runtime with semantic_cache= cannot be pickled; build it where it runs")
        # A key stays here: where it is unpickled, it is read from the environment.
        given: dict[str, Any] = {} if self.base_url is None else {"base_url": self.base_url}
        given |= {"namespace": self.namespace} if self.namespace else {}
        return partial(Runtime.shared, **given, **self.options), (os.fspath(self.model),)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "loaded" if self._thread.loaded else "not loaded"
        stats = self.stats()
        precision = f"weights in {stats.weights}, KV in {stats.kv}, " if stats.weights else ""
        return f"Runtime({self.model_name!r}, {precision}{state})"

    def load(self) -> Self:
        """Load weights and start the engine now rather than with the first request."""
        self._check_open()
        self._thread.wait_loaded()
        return self

    def close(self) -> None:
        """End waiting and running requests with an EngineError and free the model. Closing twice is fine."""
        self._thread.stop()
        self._shared.forget(self)
        if self._pid == os.getpid():
            self._thread.join()

    @property
    def closed(self) -> bool:
        return self._thread.closed

    def unavailable(self, max_step_s: float = 120.0) -> str | None:
        """Why requests get no answer now: not loaded, closed, failed, or in a step for over `max_step_s`; or None."""
        return self._thread.unavailable(max_step_s)

    @property
    def model_name(self) -> str:
        return self._source.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; loaded on first use, without the weights."""
        return self._source.tokenizer

    @property
    def processor(self) -> Processor:
        """The renderer of prompts: text, token ids or messages to the PromptInput that the engine computes."""
        return self._source.processor

    @property
    def max_model_len(self) -> int:
        """The context in tokens. Reads the model's configuration, not its weights."""
        return self._source.max_model_len

    @property
    def reads_pictures(self) -> bool | None:
        """Whether the model's configuration has a part for pictures; None for an endpoint, which does not say."""
        return self._source.reads_pictures if isinstance(self._source, ModelSource) else None

    @property
    def fingerprint(self) -> str:
        """Equal for equal weights, tokenizer and precision; fit for cache keys. Reads no whole weight file."""
        return self._source.fingerprint

    @property
    def endpoint(self) -> Endpoint | None:
        """The model's endpoint; None for a model in this process."""
        return None if isinstance(self._source, ModelSource) else self._source.endpoint

    # -- calls -------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, *, namespace: str = "", **sampling: Unpack[SamplingOptions]) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompts, *, namespace: str = "", **sampling: Unpack[SamplingOptions]
    ) -> list[Completion]: ...

    def generate(self, prompt: Any, *, namespace: str = "", **sampling: Any) -> Any:
        """Answer a prompt: a Completion; for a list of prompts a list of them, in order, submitted at once.

        prompt     text taken as is, token ids, or messages; or a list of these.
        namespace  whose KV is reused, and that gets this prompt's; the runtime's own by default.
        """
        self.check_may_wait("generate()")
        params, space = SamplingParams.from_options(**sampling), _checked_namespace(namespace)
        if not is_batch(prompt):
            return self.complete(Request(prompt, params, space))
        return self._answer([Request(p, params, space) for p in prompt])

    @overload
    async def agenerate(
        self, prompt: Prompt, *, namespace: str = "", **sampling: Unpack[SamplingOptions]
    ) -> Completion: ...

    @overload
    async def agenerate(
        self, prompt: Prompts, *, namespace: str = "", **sampling: Unpack[SamplingOptions]
    ) -> list[Completion]: ...

    async def agenerate(self, prompt: Any, *, namespace: str = "", **sampling: Any) -> Any:
        """`generate` on any event loop; cancelling the task frees the request's KV."""
        params, space = SamplingParams.from_options(**sampling), _checked_namespace(namespace)
        batch = is_batch(prompt)
        requests = [Request(p, params, space) for p in (prompt if batch else [prompt])]
        listeners = [AsyncListener(asyncio.get_running_loop()) for _ in requests]
        self._submit(requests, listeners)
        done = await results([listener.future for listener in listeners])
        return done if batch else done[0]

    def stream(self, prompt: Prompt, *, namespace: str = "", **sampling: Unpack[SamplingOptions]) -> ChunkStream:
        """Iterate over the answer as it is written. Closing the iterator cancels the request."""
        params = SamplingParams.from_options(**sampling)
        request = Request(prompt, params, _checked_namespace(namespace), stream=True)
        return self.submit_stream(request)

    async def astream(
        self, prompt: Prompt, *, namespace: str = "", **sampling: Unpack[SamplingOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` on any event loop."""
        params = SamplingParams.from_options(**sampling)
        request = Request(prompt, params, _checked_namespace(namespace), stream=True)
        async for chunk in self.submit_astream(request):
            yield chunk

    def select(self, prompt: Any, choices: Sequence[str], method: str = "token_length_normalized") -> Selection:
        """Choose among texts by their likelihood after the prompt."""
        self.check_may_wait("select()")
        from graftlm.core.program.select import select

        return select(self, prompt, choices, method=method)

    def score(self, prompt: Any, continuation: str | Sequence[int]) -> Score:
        """Log-probabilities (natural log) of given text or token ids after the prompt."""
        self.check_may_wait("score()")
        encode = self.tokenizer.encode_continuation
        ids = encode(continuation) if isinstance(continuation, str) else [int(i) for i in continuation]
        if not ids:
            raise ConfigError("the continuation is empty; give at least one token to score")
        done = self.complete(Request(prompt, score_ids=ids))
        return Score(ids, [t.logprob for t in done.logprobs or [] if t.logprob is not None], done.usage)

    def logits(self, token_ids: Sequence[int]) -> Future[np.ndarray]:
        """The logits after given token ids, float32 [vocab_size]; the ids' KV is cached."""
        future: Future[np.ndarray] = EngineFuture(self._thread)
        inner = self.submit(Request(list(token_ids), want_logits=True))
        future.add_done_callback(lambda outer: outer.cancelled() and inner.cancel())
        inner.add_done_callback(partial(pass_logits, future))
        return future

    def warm(self, prefix: Any) -> Pin:
        """Compute a prefix and keep it from eviction until `unpin()`."""
        self.check_may_wait("warm()")
        if isinstance(prefix, list | tuple) and prefix and not isinstance(prefix[0], int):
            prefix = self.processor.encode(prefix, add_generation_prompt=False)
        done = self.complete(Request(prefix, want_logits=True, pin=True))
        return Pin(self._thread, done.pin, done.usage.prompt_tokens)

    def hold(
        self,
        prefix: Completion | Request | Prompt,
        seconds: float | None = None,
        *,
        label: str = "",
        namespace: str = "",
    ) -> Held:
        """Say that a caller returns with a cached prefix after a pause, for example of a tool; returns at once.

        prefix   the answer to a request, that request, or a prompt
        seconds  expected pause; None for the mean of earlier pauses with this label, at first 1 second
        label    of the cause of the pause, such as the name of a tool

        The KV is kept where it is cheapest meanwhile. Among prefixes on hold that of the latest return is evicted
        first: before all others where host memory is behind the pool (CacheConfig.host_bytes) and the pause is 0.25
        seconds or longer, else after all others. A hold takes no memory and changes no answer. It ends when a request
        begins with the prefix, with `release()`, or after 4 times the expected pause and a second.

        Engines without a cache of their own (endpoints, Ray) ignore it.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise ConfigError(f"hold: seconds is {seconds!r}; give the expected pause, above 0, or None")
        key: int | np.ndarray
        if isinstance(prefix, Completion | Request):
            key = prefix.request_id if isinstance(prefix, Completion) else prefix.id
        else:
            key = np.asarray(self.processor.encode(prefix, add_generation_prompt=False).ids, np.int32)
        number = next(_hold_numbers)
        self._thread.post(partial(_hold, number, key, namespace or self.namespace, seconds, label))
        return Held(self._thread, number)

    @overload
    def explain(self, completion: Completion) -> CacheReport: ...
    @overload
    def explain(self, completion: list[Any], sources: Sequence[str | os.PathLike[str]] = ()) -> Suggestion: ...
    def explain(
        self, completion: Completion | list[Any], sources: Sequence[str | os.PathLike[str]] = ()
    ) -> CacheReport | Suggestion:
        """Say how much of a request's prompt was cached, and where and why it left the cache.

        A list of prompts (texts, messages, or requests of `record`): where they stop sharing, and the order of their
        paragraphs that shares more. sources: Python files in which to look for the line to change.
        """
        if not isinstance(completion, Completion):
            from graftlm.core.program.compiler.recording import explain

            return explain(self, completion, [Path(source) for source in sources])
        usage, miss = completion.usage, completion.miss
        counts = usage.prompt_tokens, usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens
        hints = [] if miss is None else miss.hints
        if miss is None or not miss.cached_next:
            return CacheReport(*counts, hints=hints)
        shown = self._shown
        texts = shown(miss.shared_tail), shown(miss.cached_next), shown(miss.prompt_next)
        return CacheReport(*counts, *texts, hints=hints)

    @contextmanager
    def record(self) -> Generator[list[Request]]:
        """Record the requests that are submitted inside the block, by any framework, for `explain`."""
        from graftlm.core.program.compiler.recording import recorded

        requests: list[Request] = []
        with recorded(self) as found:
            try:
                yield requests
            finally:
                requests.extend(request for _, request in found)

    def _shown(self, ids: Sequence[int]) -> str:
        """The text of a prompt's ids; those of a picture, or of several, as "<picture>"."""
        groups = itertools.groupby(ids, lambda token_id: token_id < 0)
        return "".join("<picture>" if of_picture else self.tokenizer.decode(part) for of_picture, part in groups)

    def stats(self) -> Stats:
        """A snapshot of the engine's counters; all zero before the model is loaded."""
        engine = self._thread.engine
        stats = engine.stats() if engine is not None else Stats()
        if self._semantic is not None:
            cache = self._semantic.cache
            stats.semantic_hits, stats.semantic_misses, stats.semantic_entries = cache.hits, cache.misses, len(cache)
        return stats

    @property
    def usage(self) -> Usage:
        """What all calls to an endpoint have cost so far, as a RemoteUsage. Only with `base_url`."""
        if isinstance(self._source, ModelSource):
            raise ConfigError("a model in this process has no bill; see stats()")
        return self._source.endpoint.spent

    def reset_stats(self) -> None:
        if self._thread.engine is not None:
            self._thread.call(lambda engine: engine.reset_stats(), "reset_stats()")

    def clear_cache(self) -> None:
        """Forget every cached prefix that is neither in use nor pinned."""
        if self._thread.engine is not None:
            self._thread.call(lambda engine: engine.clear_cache(), "clear_cache()")

    def drop_cached(self, ids: Sequence[int] | np.ndarray, keep: int = 0) -> None:
        """Give back the KV of token ids that no request needs again, after the first `keep`; returns at once.

        What a running request, a pin or another cached prompt uses stays. Engines without such a call ignore it.
        """
        self._thread.post(partial(_drop_cached, np.asarray(ids, np.int32), keep, self.namespace))

    # -- submission --------------------------------------------------------------------------------------------

    def complete(self, request: Request) -> Completion:
        """Queue one request and wait for its answer: `submit(request).result()` at a lower price."""
        self.check_may_wait("complete()")
        answer = Answer(checked(request).on_chunk, self._thread.wakes)
        given = self._prepare_one(request, answer)
        try:
            self._add([given])
            return answer.wait()
        finally:
            if not answer.ended:  # the wait was interrupted
                self._cancel(given.id)

    def submit(self, request: Request) -> Future[Completion]:
        """Queue one request. Cancelling the future frees its KV within one step."""
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Queue requests as one: the scheduler sees all their prefixes before it orders them.

        Of many long prompts the first are computed while others are tokenised. What cannot be encoded fails alone.
        """
        futures: list[Future[Completion]] = [EngineFuture(self._thread) for _ in requests]
        listeners = [FutureListener(f, checked(r).on_chunk) for f, r in zip(futures, requests, strict=True)]
        self._submit(requests, listeners)
        return futures

    def submit_stream(self, request: Request) -> ChunkStream:
        """Queue a request and iterate over its chunks from this thread."""
        self.check_may_wait("stream()")
        listener = StreamListener()
        given = self._prepare_one(replace(checked(request), stream=True), listener)
        stream = ChunkStream(listener, partial(self._cancel, given.id), self.check_may_wait)
        self._add([given])
        return stream

    async def submit_astream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Queue a request and iterate over its chunks on the running event loop."""
        listener = StreamListener(asyncio.get_running_loop())
        given = self._prepare_one(replace(checked(request), stream=True), listener)
        try:
            self._add([given])
            async for chunk in listener.chunks():
                yield chunk
        finally:
            if not listener.ended:
                self._cancel(given.id)

    def _submit(self, requests: Sequence[Request], listeners: Sequence[FutureListener | AsyncListener]) -> None:
        """Queue requests, to be cancelled with their futures. One that cannot be prepared fails at once."""
        self._check_open()
        with cancelled_on_error([listener.future for listener in listeners]):
            for part in self._source.waves(requests):
                given = self._prepare(requests[part], listeners[part])
                for listener, one in zip(listeners[part], given, strict=True):
                    if isinstance(one, GraftError):
                        listener.on_error(one)
                    else:
                        listener.future.add_done_callback(
                            partial(pass_cancel, weakref.WeakMethod(self._whole._cancel), one.id)
                        )
                self._add([one for one in given if isinstance(one, Submission)])

    def _add(self, given: list[Submission]) -> None:
        """Hand submissions to the engine, except those that the semantic cache answers."""
        self._thread.add(given if self._semantic is None else self._semantic.unknown(given))

    def _prepare_one(self, request: Request, listener: Listener) -> Submission:
        self._check_open()
        (given,) = self._prepare([request], [listener])
        if isinstance(given, GraftError):
            raise given
        return given

    def _prepare(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> list[Submission | GraftError]:
        """Prepare requests for the engine; a request that cannot be prepared gives the reason instead."""
        arrived_s = time.monotonic()
        remote = self.base_url is not None
        if self.namespace:
            requests = [one if one.namespace else replace(one, namespace=self.namespace) for one in requests]
        seen = [traced(*one, self.model_name, remote=remote) for one in zip(requests, listeners, strict=True)]
        listeners = [CheckedListener.wrap(*one, self._ask_again) for one in zip(requests, seen, strict=True)]
        given = [
            inputs if isinstance(inputs, GraftError) else Submission(request, listener, *inputs, arrived_s)
            for request, listener, inputs in zip(requests, listeners, self._source.prepare(requests), strict=True)
        ]
        if not self._thread.loaded and any(isinstance(one, Submission) and one.grammar for one in given):
            self._thread.start()  # weights load meanwhile: a wrong constraint is an error at once, not after them
            until_s = time.monotonic() + CONSTRAINT_WAIT_S
            given = [isinstance(one, Submission) and one.constraint_error(until_s) or one for one in given]
        for one, listener in zip(given, seen, strict=True):
            if isinstance(one, Submission) and isinstance(one.listener, CheckedListener):
                one.listener.first = one
            elif isinstance(one, GraftError) and isinstance(listener, TracedListener):
                listener.end(one)
        return given

    def _ask_again(self, request: Request, listener: CheckedListener) -> None:
        """Submit a request again, in place of its first submission, because its answer failed its check."""
        first = listener.first
        assert first is not None
        (inputs,) = self._source.prepare([request])
        if isinstance(inputs, GraftError):
            raise inputs
        self._check_open()
        self._thread.add([Submission(request, listener, *inputs, first.arrived_s, first.id)])

    def check_may_wait(self, name: str) -> None:
        """Raise EngineError on the engine's own thread, where the call `name` would wait for itself."""
        self._thread.check_may_wait(name)

    def _answer(self, requests: Sequence[Request]) -> list[Completion]:
        futures = self.submit_many(requests)
        with cancelled_on_error(futures):
            wait(futures, return_when=FIRST_EXCEPTION)  # to wake up for each would keep the engine's thread from work
            for future in futures:
                if future.done():
                    future.result()
            return [future.result() for future in futures]

    def _cancel(self, submission_id: int) -> None:
        if not self._thread.closed:
            self._thread.post(lambda engine: engine.cancel(submission_id))

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise EngineError("this runtime was made before the process was forked; make a new one in the child")
        if self._thread.failure is not None:
            raise self._thread.failure
        if self._thread.closed:
            raise EngineError("the runtime is closed; make a new one")


def _hold(number: int, key: int | np.ndarray, namespace: str, seconds: float | None, label: str, engine: Any) -> None:
    waits = waits_of(engine)
    if waits is not None:
        waits.hold(number, key, namespace, seconds, label)


def _drop_cached(ids: np.ndarray, keep: int, namespace: str, engine: Any) -> None:
    drop = getattr(engine, "drop", None)
    if drop is not None:
        drop(ids, keep, namespace)


def _checked_namespace(namespace: object) -> str:
    if not isinstance(namespace, str):
        raise ConfigError(f"namespace is {namespace!r}; give a text, such as the name of a tenant")
    return namespace
