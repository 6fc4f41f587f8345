"""Inspector: notes every call of a round, token by token, and where its time goes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from graftlm.ab.profile import FRAMEWORK, Call, Profile, by_phase, num_unique, outside
from graftlm.ab.runtime_calls import End, follow

if TYPE_CHECKING:
    from graftlm.core.request import Completion, Request
    from graftlm.core.runtime import Runtime


class Inspector:
    """Looks into GraftLM's runtimes and transformers models while `watch` is open.

    Each forward pass counts as prefill where a row has several new tokens, else as decode. On a GPU it is waited for,
    so that its time is its own.
    """

    def __init__(self, runtimes: Sequence[Runtime], models: Sequence[Any]) -> None:
        self._runtimes, self._models = runtimes, models
        self._lock = threading.Lock()
        self._local = threading.local()
        self._started = 0.0
        self._spent: list[tuple[str, float, float]] = []
        self._calls: list[Call] = []
        self._ahead: list[Call] = []  # prefixes that a runtime computes ahead of the calls
        self._batches: list[int] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the calls made inside."""
        with ExitStack() as undo:
            for runtime in self._runtimes:
                self._watch_runtime(runtime, undo)
            for model in self._models:
                self._watch_model(model, undo)
            self._calls, self._ahead, self._spent, self._batches = [], [], [], []
            self._started = time.perf_counter()
            yield

    def calls(self, spans: Sequence[tuple[float, float]] = ()) -> list[Call]:
        """The calls in the order of their beginning; of an engine that cannot be looked into, its calls' `spans`."""
        known = self._calls or [Call(begin, end) for begin, end in spans]
        return sorted(known, key=lambda call: call.begin_s)

    def profile(self, wall_s: float, spans: Sequence[tuple[float, float]]) -> Profile:
        calls = self.calls(spans)
        framework = outside(wall_s, [*calls, *self._ahead])
        phases = by_phase(self._spent)
        rest = wall_s - framework - sum(phases.values())
        phases |= {"waiting and the rest of calls": max(0.0, rest), FRAMEWORK: framework}
        prompts = [call.prompt_ids for call in calls]
        unique = num_unique(prompts) if prompts and all(prompts) else None
        return Profile(wall_s, calls, phases, unique, fmean(self._batches) if self._batches else None)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _spend(self, phase: str, begin: float) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        with self._lock:
            self._spent.append((phase, begin, time.perf_counter()))

    # -- GraftLM -----------------------------------------------------------------------------------------------

    def _watch_runtime(self, runtime: Any, undo: ExitStack) -> None:
        undo.callback(follow(runtime, partial(self._begun, runtime), self._first))
        engine = runtime._thread.engine
        runner = getattr(engine, "runner", None)
        if runner is None:
            return
        self._time(runner, "forward", self._phase_of_plan, undo)
        self._time(engine.sampler, "_masks_of", lambda *_: "grammar", undo)

    def _begun(self, runtime: Any, requests: Sequence[Request]) -> list[End]:
        ids = runtime.tokenizer.encode_prompts([(request.prompt, request.tools) for request in requests])
        return [
            partial(self._end_ahead, Call(self._now()))
            if request.pin
            else partial(self._end, Call(self._now()), [] if isinstance(p, Exception) else p)
            for request, p in zip(requests, ids, strict=True)
        ]

    def _first(self, end: Any) -> Callable[[], None]:
        """Notes when the first chunk of a call came."""

        def chunk() -> None:
            if end.args[0].first_s is None:
                end.args[0].first_s = self._now()

        return chunk

    def _end_ahead(self, call: Call, done: Completion | None, error: BaseException | None) -> None:
        call.end_s = self._now()
        with self._lock:
            self._ahead.append(call)

    def _end(self, call: Call, prompt: Any, done: Completion | None, error: BaseException | None) -> None:
        call.end_s = self._now()
        if done is not None and done.finish_reason != "cancelled":
            call.token_ids, call.prompt_ids = list(done.token_ids), [int(i) for i in prompt]
            call.num_tokens, call.num_prompt = len(call.token_ids), len(call.prompt_ids)
        with self._lock:
            self._calls.append(call)

    def _time(self, owner: Any, name: str, phase: Callable[..., str], undo: ExitStack) -> None:
        """Count what each call of a method takes."""
        function = getattr(owner, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._spend(phase(*args), begin)

        setattr(owner, name, timed)
        undo.callback(delattr, owner, name)

    # -- transformers ------------------------------------------------------------------------------------------

    def _watch_model(self, model: Any, undo: ExitStack) -> None:
        hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        for hook in hooks:
            undo.callback(hook.remove)
        generate = model.generate

        def generated(*args: Any, **kwargs: Any) -> Any:
            call = self._local.call = Call(self._now())
            try:
                output = generate(*args, **kwargs)
            finally:
                self._local.call = None
            call.end_s = self._now()
            self._note_ids(call, kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None)), output)
            return output

        model.generate = generated
        undo.callback(setattr, model, "generate", generate)

    def _note_ids(self, call: Call, given: Any, output: Any) -> None:
        rows = output if hasattr(output, "shape") else getattr(output, "sequences", None)
        if given is not None and rows is not None and len(rows) == 1:
            call.prompt_ids = given[0].tolist()
            call.token_ids = rows[0, given.shape[1] :].tolist()
            call.num_tokens, call.num_prompt = len(call.token_ids), len(call.prompt_ids)
        with self._lock:
            self._calls.append(call)

    def _before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        self._local.forward = time.perf_counter()

    def _after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        width = 1 if ids is None else ids.shape[-1]
        if ids is not None:
            self._batches.append(len(ids))
        self._spend("prefill" if width > 1 else "decode", self._local.forward)
        call = getattr(self._local, "call", None)
        if call is not None and call.first_s is None:
            call.first_s = self._now()

    def _phase_of_plan(self, plan: Any) -> str:
        self._batches.append(len(plan.rows))
        return "prefill" if any(row.num_new > 1 for row in plan.rows) else "decode"
