"""Engine: the requests, KV and steps of one model in this process. One thread calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from graftlm.core.config import EngineConfig
from graftlm.core.kv.memory import give_back
from graftlm.core.kv.prefix_cache import PrefixCache
from graftlm.core.kv.tiers.cache_tiers import CacheTiers
from graftlm.core.metrics import Counters, Stats
from graftlm.core.request import Completion, Request, Submission
from graftlm.core.sampling.step_sampler import StepSampler
from graftlm.core.scheduling.admission import Limits
from graftlm.core.scheduling.module_requests import ModuleRequests
from graftlm.core.scheduling.output_writer import OutputWriter
from graftlm.core.scheduling.request_tracker import RequestTracker
from graftlm.core.scheduling.scheduler import Scheduler
from graftlm.core.scheduling.speculation import Drafter
from graftlm.core.scheduling.step_loop import StepLoop
from graftlm.core.scheduling.step_times import StepPrices
from graftlm.core.scheduling.steps_ahead import StepsAhead

if TYPE_CHECKING:
    import numpy as np

    from graftlm.core.engine_builder import Runner, RunnerSpec
    from graftlm.core.text.tokenizer import Tokenizer


REST_AFTER = 2048
"""Tokens after which a CPU gives memory back to the system: their steps take a hundred times as long as that does."""


class LocalEngine:
    """A model in this process, with continuous batching; `step` runs the next step of `steps`."""

    def __init__(
        self,
        spec: RunnerSpec,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        finished: Callable[[Request, Completion], None] = lambda request, completion: None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.cache = PrefixCache(spec.num_slots, config.cache, spec.lane, spec.num_states)
        if spec.host_tier is not None:
            self.cache.tiers = CacheTiers(self.cache, spec.host_tier, spec.folder)
        self.counters = Counters()
        self.scheduler = Scheduler(config, self.cache, spec.step_tokens, self.counters, clock)
        self.writer = OutputWriter(tokenizer, min_forced=spec.min_forced if config.jump_forward else 0)
        self.sampler = StepSampler(tokenizer, self.writer, spec.vocab_size, spec.device_sampler)
        self.prices, ends = StepPrices(), tokenizer.eos_token_ids
        self.drafter = Drafter(ends, spec.step_tokens, self.prices) if spec.drafts else None
        self.requests = RequestTracker(
            self.scheduler,
            self.writer,
            Limits(
                spec.max_model_len,
                spec.num_embeddings,
                self.cache.num_slots,
                extensible=config.max_model_len is not None,
                no_pictures=spec.no_pictures,
                no_modules=spec.no_modules,
            ),
            self.drafter,
            seed=config.seed,
            wake=wake,
            finished=finished,
        )
        self.modules = ModuleRequests(self.requests, self.cache)
        self.ahead = None if spec.steps is None else StepsAhead(spec.steps, self.scheduler, ends, self.prices)
        self.waits_for_device = spec.device_sampler is not None
        self.device_wait: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while it does
        self.steps = StepLoop(
            spec,
            self.requests,
            self.sampler,
            self.prices,
            self.ahead,
            share_decode=config.shared_prefix_decode,
            device_wait=lambda: self.device_wait(),
        )
        self._num_rested = 0  # tokens that had run when memory was given back

    @property
    def runner(self) -> Runner:
        return self.steps.runner

    @property
    def idle(self) -> bool:
        return self.steps.idle

    def add(self, submissions: Seq[Submission]) -> None:
        """Queue requests; one that can never run is refused to its listener."""
        for submission in submissions:
            of_modules = submission.prompt is not None and submission.prompt.modules
            (self.modules if of_modules else self.requests).add(submission)

    def step(self) -> bool:
        """Run one step, or several at once; False if nothing could run."""
        started = time.perf_counter()
        self.requests.expire()
        self.requests.open_grammars()
        if not self.steps.run():
            tiers = self.cache.tiers
            if tiers is None or not tiers.busy:
                return False
            tiers.wait()  # all that waits does so for its prefix
        self.prices.ended(time.perf_counter() - started)
        if self.idle:
            if not self.waits_for_device and self.steps.num_tokens >= self._num_rested + REST_AFTER:
                self._num_rested = self.steps.num_tokens
                give_back()
            self.cache.check_idle()  # free + cached + in use == all slots, and none is in use now
            if self.cache.tiers is not None:
                self.cache.tiers.rest()
        return True

    def cancel(self, submission_id: int) -> None:
        """Drop a request and free its slots; unknown or finished ids are ignored."""
        self.requests.cancel(submission_id)

    def interrupt(self, wanted: bool) -> None:
        """Say whether steps that are run at once shall end with the one under way. From any thread."""
        if self.ahead is not None:
            self.ahead.runner.interrupt[0] = wanted

    def fail_all(self, error: BaseException) -> None:
        """End every request with `error`."""
        self.requests.fail_all(error)

    def stats(self) -> Stats:
        states = self.cache.states
        return Stats(
            **asdict(self.counters),
            slots_total=self.cache.num_slots,
            slots_free=self.cache.pool.num_free,
            slots_cached=self.cache.tree.num_tokens,
            slots_in_use=self.cache.num_in_use,
            states_total=states.num_slots if states is not None else 0,
            states_free=states.num_free if states is not None else 0,
            states_cached=states.num_cached if states is not None else 0,
            weights=self.spec.weights,
            kv=self.spec.kv,
            execution=self.spec.execution,
            images_encoded=self.spec.vision.num_encoded if self.spec.vision is not None else 0,
            image_bytes=self.spec.vision.num_bytes if self.spec.vision is not None else 0,
            no_images=self.spec.no_pictures or "",
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            open=self.requests.open,
            tiers=self.cache.tiers.snapshot() if self.cache.tiers is not None else {},
        )

    def reset_stats(self) -> None:
        self.counters.reset()

    def clear_cache(self) -> None:
        """Forget every cached prefix that is neither in use nor pinned."""
        self.cache.clear()
        if self.drafter is not None:
            self.drafter.forget()

    def drop(self, ids: np.ndarray, keep: int, namespace: str) -> None:
        """Free the cached KV of `ids` after the first `keep` tokens, unless something else uses it."""
        tiers = self.cache.tiers
        if tiers is not None:
            tiers.paused = True  # it is not needed in host memory either
        self.cache.pool.free(self.cache.tree.drop(ids, keep, namespace))
        if tiers is not None:
            tiers.paused = False

    def unpin(self, pin: int) -> None:
        """Let a pinned prefix be evicted again."""
        self.cache.unpin(pin)

    def close(self) -> None:
        """Leave the model as it was before it was loaded here."""
        if self.cache.tiers is not None:
            self.cache.tiers.close()
        self.spec.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + cached + in use == all slots. For tests."""
        self.cache.check_integrity(self.scheduler.running)
