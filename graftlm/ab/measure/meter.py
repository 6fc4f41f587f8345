"""Meter: calls and tokens of one engine, counted at transformers models, GraftLM runtimes and HTTP clients."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from statistics import fmean
from typing import TYPE_CHECKING, Any

from graftlm.ab.engines.servers import Server
from graftlm.ab.measure.failures import told
from graftlm.ab.measure.http_calls import HttpCalls
from graftlm.ab.measure.prefix_caches import alive, forget
from graftlm.ab.measure.profile import (
    FRAMEWORK,
    Call,
    Fingerprint,
    Profile,
    Work,
    by_phase,
    num_unique,
    outside,
)
from graftlm.core.errors import RemoteError, RequestCancelled

if TYPE_CHECKING:
    from graftlm.core.request import Chunk, Completion, Listener, Request
    from graftlm.core.runtime import Runtime

End = Callable[["Completion | None", "BaseException | None"], None]


class Meter:
    """A counter of the work of this process's engine. Call `attach` after the engine has loaded its packages.

    GraftLM's runtimes have counters of their own, except those over an endpoint. Otherwise the transformers models
    of the process are counted by their forward passes: a pass over several tokens is a prompt, whose tokens before that
    pass came from a KV cache; a pass over one token after cached ones is a decode step. Models that are no torch
    modules are counted by their calls of `generate`, each of which computes its whole prompt. Requests of HTTP clients
    to an OpenAI-compatible API are counted by the usage in their answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self.runtimes: list[Runtime] = []
        self._endpoints: set[int] = set()  # ids of runtimes over an endpoint, whose requests HTTP clients count
        self.models: list[Any] = []  # transformers models that are torch modules
        self._generating: list[Any] = []  # all models with `generate`
        self._under_way = 0
        self._is_watched = False
        self._http = HttpCalls(lambda begin: self._done(Call(begin)), lambda body: self._prompts.add(body))
        self._reset()

    def _reset(self) -> None:
        with self._lock:
            self._counted = Work(0, 0, 0, None, 0) if self._generating else Work()
            self._calls: list[Call] = []
            self._ahead: list[Call] = []  # prefixes that a runtime computes ahead of the calls
            self._failed: list[BaseException] = []
            self._phases = _Phases()
            self._prompts = Fingerprint()
        self._http.reset()

    def attach(self) -> None:
        """Find the engine's runtimes, models and HTTP clients. May be called again: each is counted once."""
        self._http.hook()
        if "graftlm.core.runtime" in sys.modules:
            from graftlm.core.runtime import Runtime

            known = {id(runtime) for runtime in self.runtimes}
            for runtime in alive(Runtime):
                if id(runtime) not in known and not runtime.closed:
                    self.runtimes.append(runtime)
                    self._follow(runtime)
        generation = sys.modules.get("transformers.generation.utils")  # importing it takes seconds; models have done so
        if generation is not None and not self.runtimes and not self._generating:
            from torch import nn

            self._generating = alive(generation.GenerationMixin)
            for model in self._generating:
                by_forward = isinstance(model, nn.Module)
                if by_forward:
                    self.models.append(model)
                    model.register_forward_pre_hook(self._count_forward, with_kwargs=True)
                model.generate = self._counting(model.generate, model, by_forward)

    def start(self) -> list[str]:
        """Begin a round: set every count to zero and empty the engine's prefix caches.

        Returns: the names of servers and endpoints whose cache cannot be emptied.
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
        self._reset()
        return kept

    # -- counts ------------------------------------------------------------------------------------------------

    def work(self) -> Work:
        """Return the counts since `start`; any thread may ask."""
        total = self._counted + Work(pictures=self._prompts.num_pictures or None)
        if num := self._http.num:
            prompt, cached, completion = (self._http.total(what) for what in ("prompt", "cached", "completion"))
            computed = prompt - cached if prompt is not None and cached is not None else None
            total += Work(num, prompt, computed, completion)
        elif self._http.refused:
            total += Work(0)
        for runtime in self.runtimes:
            if id(runtime) not in self._endpoints:
                s = runtime.stats()
                total += Work(s.requests, s.prompt_tokens, s.computed_tokens, s.completion_tokens, s.largest_batch)
        ahead = [
            call.num_prompt for call in list(self._ahead) if call.num_prompt
        ]  # a runtime counts prefixes as requests
        return total + Work(-len(ahead), -sum(ahead)) if ahead else total

    @property
    def prompts(self) -> int | None:
        """The fingerprint of the prompts since `start`; None without any."""
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
        """Describe the model calls since `start` that failed, and the requests that were refused."""
        with self._lock:
            failed = list(self._failed)
        said = [
            f"{num:,} request{'s were' if num > 1 else ' was'} answered with HTTP {status}"
            for status, num in self._http.refused.items()
        ]
        if len(failed) > 1:
            return [*said, f"{len(failed):,} model calls failed, the first with {told(failed[0])}"]
        return said + [f"a model call failed with {told(one)}" for one in failed]

    def under_way(self, patience_s: float = 0.2) -> int:
        """Return the number of model calls that have begun and not ended, at the latest after `patience_s`.

        A stream of transformers gives its last piece shortly before `generate` returns.
        """
        deadline = time.perf_counter() + patience_s
        while (num := self._under_way + self._http.under_way) and time.perf_counter() < deadline:
            time.sleep(0.001)
        return num

    def calls(self, started: float = 0.0) -> list[Call]:
        """Return the ended calls in order of their beginning, in seconds after `started` (of `time.perf_counter`)."""
        with self._lock:
            return sorted((call.after(started) for call in self._calls), key=lambda call: call.begin_s)

    # -- a closer look -----------------------------------------------------------------------------------------

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note token ids and first tokens of the calls made inside, and the time of forward passes and token masks.

        A forward pass counts as prefill where a row has several new tokens, else as decode. On a GPU each pass is
        synchronised, which costs time.
        """
        self._reset()
        phases = self._phases
        with ExitStack() as undo:
            for runtime in self.runtimes:
                engine: Any = runtime._thread.engine
                if hasattr(engine, "runner"):
                    phases.time(engine.runner, "forward", phases.of_plan, undo)
                    phases.time(engine.sampler, "_masks_of", lambda *_: "grammar", undo)
            for model in self.models:
                undo.callback(model.register_forward_hook(self._after_forward, with_kwargs=True).remove)
            self._is_watched = True
            undo.callback(setattr, self, "_is_watched", False)
            yield

    def profile(self, started: float, wall_s: float) -> Profile:
        """Return the calls and the phases of a watched round."""
        calls = self.calls(started)
        # Forward passes are listed too: Guidance runs a transformers model without a call of `generate`.
        passes = [Call(begin, end) for _, begin, end in self._phases.spent]
        framework = outside(wall_s, [*calls, *(call.after(started) for call in [*self._ahead, *passes])])
        phases, batches = by_phase(self._phases.spent), self._phases.batches
        rest = wall_s - framework - sum(phases.values())
        phases |= {"waiting and the rest of calls": max(0.0, rest), FRAMEWORK: framework}
        prompts = [call.prompt_ids for call in calls]
        is_known = bool(prompts) and all(prompts)
        fingerprint = Fingerprint()
        for ids in prompts if is_known else ():
            fingerprint.add(ids)
        unique = num_unique(prompts, [call.token_ids for call in calls]) if is_known else None
        return Profile(wall_s, calls, phases, unique, fmean(batches) if batches else None, fingerprint.value)

    # -- single calls ------------------------------------------------------------------------------------------

    def _begin(self, prompt: Any, *, pictures: bool = True) -> Call:
        self._prompts.add(prompt, pictures=pictures)
        with self._lock:
            self._under_way += 1
        return Call(time.perf_counter())

    def _done(self, call: Call) -> None:
        call.end_s = time.perf_counter()
        with self._lock:
            self._calls.append(call)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._under_way -= 1
            if error is not None and not isinstance(error, RequestCancelled):
                self._failed.append(error)

    # -- GraftLM -----------------------------------------------------------------------------------------------

    def _follow(self, runtime: Any) -> None:
        """Follow every request of a runtime from its submission to its end: futures, streams and event loops alike."""
        prepare = runtime._prepare

        def prepared(requests: Any, listeners: Any) -> Any:
            requests = list(requests)
            ends = [self._submitted(runtime, request) for request in requests]
            sent = [_in_chunks(request) for request in requests] if self._is_watched else requests
            followed = [
                Followed(listener, end, call, request.stream)
                for request, listener, (call, end) in zip(requests, listeners, ends, strict=True)
            ]
            given = prepare(sent, followed)
            for one, (_, end) in zip(given, ends, strict=True):
                if isinstance(one, BaseException):  # it never reaches the engine, nor its listener
                    end(None, one)
            return given

        runtime._prepare = prepared

    def _submitted(self, runtime: Any, request: Request) -> tuple[Call, End]:
        if request.pin:
            call = Call(time.perf_counter())
            return call, partial(self._ended_ahead, call)
        call = self._begin(request.prompt, pictures=id(runtime) not in self._endpoints)  # HTTP clients count theirs
        if self._is_watched:
            (prompt,) = runtime.processor.encode_batch([(request.prompt, request.tools)])
            call.prompt_ids = [] if isinstance(prompt, Exception) else prompt.ids.tolist()
        return call, partial(self._answered, runtime, call)

    def _ended_ahead(self, call: Call, done: Completion | None, error: BaseException | None) -> None:
        call.end_s = time.perf_counter()
        call.num_prompt = done.usage.prompt_tokens if done is not None else 0
        with self._lock:
            self._ahead.append(call)

    def _answered(self, runtime: Any, call: Call, done: Completion | None, error: BaseException | None) -> None:
        if done is not None and done.finish_reason != "cancelled":
            call.token_ids = list(done.token_ids)
        else:
            call.prompt_ids = []
        if id(runtime) not in self._endpoints:
            self._done(call)
        self._end(error)

    # -- transformers ------------------------------------------------------------------------------------------

    def _counting(self, generate: Callable[..., Any], model: Any, by_forward: bool) -> Callable[..., Any]:
        """Wrap `generate` so that it counts its tokens; those of the prompt too, unless forward passes are counted."""

        @wraps(generate)
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            call = self._local.call = self._begin(None if given is None else given.tolist())
            error: BaseException | None = None
            try:
                output = generate(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                self._local.call = None
                self._done(call)
                self._end(error)
            rows = output if hasattr(output, "shape") else getattr(output, "sequences", None)
            if self._is_watched and given is not None and rows is not None and len(rows) == 1:
                call.prompt_ids, call.token_ids = given[0].tolist(), rows[0, given.shape[1] :].tolist()
            grids = kwargs.get("image_grid_thw", kwargs.get("image_sizes", kwargs.get("pixel_values")))
            num_grids = None if grids is None else len(grids)
            work = Work(completion_tokens=_num_generated(model, given, rows), pictures=num_grids)
            if not by_forward and given is not None:
                mask = kwargs.get("attention_mask")
                num_tokens = int(mask.sum()) if mask is not None else given.numel()
                work += Work(len(given), num_tokens, num_tokens, None, len(given))
            with self._lock:
                self._counted += work
            return output

        return counted

    def _count_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        from graftlm.core.execution.cache_name import cache_in

        self._local.forward = time.perf_counter()
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return
        rows, width = ids.shape
        if getattr(self._local, "call", None) is None:
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

    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            self._phases.batches.append(len(ids))
        self._phases.spend("decode" if ids is None or ids.shape[-1] == 1 else "prefill", self._local.forward)
        call = getattr(self._local, "call", None)
        if call is not None and call.first_s is None:
            call.first_s = time.perf_counter()


class _Phases:
    """The time of forward passes and token masks, and the sizes of batches.

    spent  phase, begin and end of each
    """

    def __init__(self) -> None:
        self.spent: list[tuple[str, float, float]] = []
        self.batches: list[int] = []

    def time(self, owner: Any, name: str, phase: Callable[..., str], undo: ExitStack) -> None:
        """Note the time of each call of a method."""
        function = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.spend(phase(*args), begin)

        setattr(owner, name, timed)
        undo.callback(delattr, owner, name)

    def spend(self, phase: str, begin: float) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.spent.append((phase, begin, time.perf_counter()))

    def of_plan(self, plan: Any) -> str:
        """Return the phase of a step."""
        self.batches.append(len(plan.rows))
        return "prefill" if any(row.num_new > 1 for row in plan.rows) else "decode"


class Followed:
    """A wrapper of a request's listener that records the first chunk, and reports the end before the caller gets it."""

    def __init__(self, listener: Listener, end: End, call: Call, wants_chunks: bool) -> None:
        self._listener, self._end, self._call, self._wants_chunks = listener, end, call, wants_chunks

    def on_chunk(self, chunk: Chunk) -> None:
        if self._call.first_s is None:
            self._call.first_s = time.perf_counter()
        if self._wants_chunks:
            self._listener.on_chunk(chunk)

    def on_finish(self, completion: Completion) -> None:
        self._end(completion, None)
        self._listener.on_finish(completion)

    def on_error(self, error: BaseException) -> None:
        self._end(None, error)
        self._listener.on_error(error)


def _in_chunks(request: Request) -> Request:
    generates = request.score_ids is None and not request.want_logits
    return dataclasses.replace(request, stream=True) if generates else request


def _num_generated(model: Any, given: Any, rows: Any) -> int:
    """Count the tokens that `generate` has added, each row up to its first end token."""
    if rows is None:
        return 0
    first = 0 if given is None or getattr(model.config, "is_encoder_decoder", False) else given.shape[1]
    ends = model.generation_config.eos_token_id
    known = set(ends) if isinstance(ends, list | tuple) else {ends}
    found: Sequence[list[int]] = rows[:, first:].tolist()
    return sum(next((i + 1 for i, token in enumerate(row) if token in known), len(row)) for row in found)
