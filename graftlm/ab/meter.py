"""Meter: the work that one engine did, counted at transformers models, GraftLM runtimes and HTTP clients."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from graftlm.ab.classes.server import Server
from graftlm.ab.failures import told
from graftlm.ab.fingerprint import Fingerprint
from graftlm.ab.http_calls import HttpCalls
from graftlm.ab.prefix_caches import alive, forget
from graftlm.ab.runtime_calls import End, follow
from graftlm.core.errors import RemoteError, RequestCancelled

if TYPE_CHECKING:
    from torch import nn

    from graftlm.core.request import Completion, Request
    from graftlm.core.runtime import Runtime

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """Counts over one round. None: this engine gives no such count.

    calls              model calls; prefixes that GraftLM computes ahead of them are none, but their tokens are computed
    prompt_tokens      tokens of all prompts, as asked for
    computed_tokens    those of them that were run through the model
    completion_tokens  generated tokens; None where a framework picks them itself from logits, as Guidance does
    largest_batch      the most sequences in one forward pass
    """

    calls: int | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    completion_tokens: int | None = None
    largest_batch: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that was not computed."""
        if self.computed_tokens is None or not self.prompt_tokens:
            return None
        return 1 - self.computed_tokens / self.prompt_tokens

    def __add__(self, other: Work) -> Work:
        def total(a: int | None, b: int | None) -> int | None:
            return a if b is None else b if a is None else a + b

        batches = [batch for batch in (self.largest_batch, other.largest_batch) if batch is not None]
        return Work(
            total(self.calls, other.calls),
            total(self.prompt_tokens, other.prompt_tokens),
            total(self.computed_tokens, other.computed_tokens),
            total(self.completion_tokens, other.completion_tokens),
            max(batches, default=None),
        )


class Meter:
    """Counts the work of the one engine of this process. `attach` once the engine has loaded all it needs.

    GraftLM's runtimes count for themselves, unless they stand in front of an endpoint. Without any, the transformers
    models of the process are counted by their forward passes: a pass over several tokens is a prompt, whose tokens
    before that pass came from a KV cache; a pass over one token after cached ones is a decode step. Models that are no
    torch modules, such as optimum's, are counted by their calls of `generate`, which are taken to compute the whole
    prompt. Requests of HTTP clients to an OpenAI-compatible API are counted by the usage that their answers tell.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted = Work()
        self._spans: list[tuple[float, float]] = []
        self._ahead = (0, 0)
        self._failed: list[BaseException] = []
        self._under_way = 0
        self._local = threading.local()
        self._prompts = Fingerprint()
        self.runtimes: list[Runtime] = []
        self._endpoints: set[int] = set()  # the ids of runtimes in front of one
        self.models: list[Any] = []
        self._generating: list[Any] = []  # transformers models, and those of its kin that run elsewhere
        self._llamas: list[Any] = []
        self._http = HttpCalls(self._span, lambda body: self._prompts.add(body))
        self._http.hook()

    def attach(self) -> None:
        """Find the engine's runtimes, models and HTTP clients. May be called again: each is counted once."""
        self._http.hook()
        if "graftlm.core.runtime" in sys.modules:
            from graftlm.core.runtime import Runtime

            known = {id(runtime) for runtime in self.runtimes}
            for runtime in alive(Runtime):
                if id(runtime) not in known and not runtime.closed:
                    self.runtimes.append(runtime)
                    follow(runtime, partial(self._begun, runtime))
        if "transformers" in sys.modules and not self.runtimes and not self._generating:
            from torch import nn
            from transformers import GenerationMixin

            self._generating = alive(GenerationMixin)
            for model in self._generating:
                by_forward = isinstance(model, nn.Module)
                if by_forward:
                    self.models.append(model)
                    model.register_forward_pre_hook(self._count_forward, with_kwargs=True)
                model.generate = self._timed(model.generate, model, by_forward)
        if "llama_cpp" in sys.modules and not self._llamas:
            self._llamas = alive(sys.modules["llama_cpp"].Llama)
            for llama in self._llamas:
                llama.create_completion = self._completing(llama.create_completion)

    def start(self) -> list[str]:
        """Begin a round: set every count to zero and empty the engine's prefix caches.

        Returns: the names of servers and endpoints whose cache could not be emptied.
        """
        kept = []
        for runtime in self.runtimes:
            try:
                runtime.clear_cache()
                runtime.reset_stats()
            except RemoteError:
                kept.append(repr(runtime))
                self._endpoints.add(id(runtime))
        forget()
        kept += [server.name for server in Server.open if not server.reset()]
        with self._lock:
            self._counted = Work(0, 0, 0, None, 0) if self._generating else Work()
            self._spans, self._ahead, self._failed = [], (0, 0), []
            self._prompts = Fingerprint()
        self._http.reset()
        return kept

    def work(self) -> Work:
        """The counts since `start`; any thread may ask."""
        total = self._counted + self._asked()
        for runtime in self.runtimes:
            if id(runtime) not in self._endpoints:  # whose requests are counted at the HTTP client, as they are paid
                s = runtime.stats()
                total += Work(s.requests, s.prompt_tokens, s.computed_tokens, s.completion_tokens, s.largest_batch)
        calls, tokens = self._ahead
        return total + Work(-calls, -tokens) if calls else total

    def _asked(self) -> Work:
        """The requests of HTTP clients."""
        if not self._http.num:
            return Work(0) if self._http.refused else Work()
        prompt, cached, completion = (self._http.total(what) for what in ("prompt", "cached", "completion"))
        computed = prompt - cached if prompt is not None and cached is not None else None
        return Work(self._http.num, prompt, computed, completion)

    @property
    def prompts(self) -> int | None:
        """A number that tells the prompts since `start` from others, whatever their order; None if none was seen."""
        return self._prompts.value

    @property
    def num_failed(self) -> int:
        """Calls of models and runtimes since `start` that ended in an error."""
        with self._lock:
            return len(self._failed)

    @property
    def num_refused(self) -> int:
        """Requests since `start` that were answered with an error; a client may have sent them again."""
        return self._http.refused.total()

    def failed(self) -> list[str]:
        """Model calls since `start` that failed, and requests that were refused; one text each."""
        with self._lock:
            failed = list(self._failed)
        said = [
            f"{num:,} request{'s were' if num > 1 else ' was'} answered with HTTP {status}"
            for status, num in self._http.refused.items()
        ]
        return said + (
            [f"{len(failed):,} model calls failed, the first with {told(failed[0])}"] if len(failed) > 1
            else [f"a model call failed with {told(one)}" for one in failed]
        )  # fmt: skip

    def under_way(self, patience_s: float = 0.2) -> int:
        """Model calls that have begun and not ended, at the latest after `patience_s`.

        A stream of transformers has given its last piece a little before `generate` returns.
        """
        deadline = time.perf_counter() + patience_s
        while (num := self._under_way + self._http.under_way) and time.perf_counter() < deadline:
            time.sleep(0.001)
        return num

    def _begin(self, prompt: Any) -> None:
        self._prompts.add(prompt)
        with self._lock:
            self._under_way += 1

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._under_way -= 1
            if error is not None and not isinstance(error, RequestCancelled):
                self._failed.append(error)

    def spans(self, started: float) -> list[tuple[float, float]]:
        """Start and end of each call, in seconds after `started` (of `time.perf_counter`)."""
        with self._lock:
            return sorted((begin - started, end - started) for begin, end in self._spans)

    def _span(self, begin: float) -> None:
        with self._lock:
            self._spans.append((begin, time.perf_counter()))

    def _answered(self, runtime: Any, begin: float, done: Completion | None, error: BaseException | None) -> None:
        self._end(error)
        if id(runtime) not in self._endpoints:
            self._span(begin)

    def _note_ahead(self, done: Completion | None, error: BaseException | None) -> None:
        """A prefix that a runtime has computed ahead of the calls: nobody called for it.

        An engine that keeps nothing has computed and counted nothing then.
        """
        if done is not None and (num := done.usage.prompt_tokens):
            with self._lock:
                calls, tokens = self._ahead
                self._ahead = calls + 1, tokens + num

    def _timed(self, generate: Callable[..., T], model: Any, by_forward: bool) -> Callable[..., T]:
        """`generate` with its time and its tokens; those of the prompt too, unless forward passes are counted."""

        @wraps(generate)
        def timed(*args: Any, **kwargs: Any) -> T:
            begin = time.perf_counter()
            given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            self._begin(None if given is None else given.tolist())
            self._local.generates = True
            error: BaseException | None = None
            try:
                output = generate(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._local.generates = False
                self._end(error)
                self._span(begin)
            work = Work(completion_tokens=_num_generated(model, given, output))
            if not by_forward and given is not None:
                mask = kwargs.get("attention_mask")
                num_tokens = int(mask.sum()) if mask is not None else given.numel()
                work += Work(len(given), num_tokens, num_tokens, None, len(given))
            with self._lock:
                self._counted += work
            return output

        return timed

    def _completing(self, complete: Callable[..., T]) -> Callable[..., T]:
        """llama-cpp-python's completions, chats too, with the usage they tell; a stream tells none."""

        @wraps(complete)
        def timed(*args: Any, **kwargs: Any) -> T:
            begin = time.perf_counter()
            self._prompts.add([args, kwargs.get("prompt")])
            answer = complete(*args, **kwargs)
            usage = answer.get("usage") or {} if isinstance(answer, dict) else {}
            with self._lock:
                self._counted += Work(1, usage.get("prompt_tokens"), None, usage.get("completion_tokens"), 1)
            self._span(begin)
            return answer

        return timed

    def _begun(self, runtime: Any, requests: Sequence[Request]) -> list[End]:
        begin = time.perf_counter()
        for request in requests:
            if not request.pin:
                self._begin(request.prompt)
        return [self._note_ahead if one.pin else partial(self._answered, runtime, begin) for one in requests]

    def _count_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from graftlm.core.execution.cache_name import cache_in

        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return
        rows, width = ids.shape
        if not getattr(self._local, "generates", False):
            self._prompts.add(ids.tolist())
        past = cache_in(kwargs)
        num_past = past.get_seq_length() if past is not None else 0
        mask = kwargs.get("attention_mask")
        if num_past > 0:
            prompt = int(width > 1)
            step = Work(rows * prompt, rows * (num_past + width) * prompt, rows * width * prompt, None, rows)
        else:
            num_tokens = int(mask.sum()) if mask is not None and mask.shape == ids.shape else rows * width
            step = Work(rows, num_tokens, num_tokens, None, rows)
        with self._lock:
            self._counted += step


def _num_generated(model: Any, given: Any, output: Any) -> int:
    """Tokens that `generate` has added, each row up to its first end token."""
    rows = output if hasattr(output, "shape") else getattr(output, "sequences", None)
    if rows is None:
        return 0
    first = 0 if given is None or getattr(model.config, "is_encoder_decoder", False) else given.shape[1]
    ends = model.generation_config.eos_token_id
    known = set(ends) if isinstance(ends, list | tuple) else {ends}
    total = 0
    for row in rows[:, first:].tolist():
        total += next((i + 1 for i, token in enumerate(row) if token in known), len(row))
    return total
