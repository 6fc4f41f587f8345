"""Crew: the followers of a runtime, as rank 0 starts, feeds and watches them."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from graftlm.core.errors import ConfigError, EngineError
from graftlm.core.model.description import model_config, resolve
from graftlm.core.model.quantised.rounding import SCHEMES
from graftlm.core.model.weights import choose_device
from graftlm.core.tensor_parallel.plan_ring import PlanRing, memory_bytes, new_memory
from graftlm.core.tensor_parallel.ranks import Meeting, Ranks
from graftlm.core.tensor_parallel.shard_plan import ShardPlan
from graftlm.kernels.jit import python_process

if TYPE_CHECKING:
    from graftlm.core.config import EngineConfig
    from graftlm.core.engine_builder import Runner, RunnerSpec
    from graftlm.kernels.wire_plan import WirePlan

TICK_S = 0.1
"""Seconds between two looks at the followers."""

SILENT_TICKS = 40
"""Looks without a beat of a follower after which it is ended: it is stopped, or computes nothing."""

SLOW_LOAD = 15
"""Factor of these looks while models are loaded: compilers may keep a process from beating."""

LATE_TICKS = 40
"""Looks in which this rank waits for a follower in one sum, or has launched a step that the follower has not."""

LOAD_S = 1800.0
"""Seconds that a follower may take longer than rank 0 to load its shard."""

END_S = 2.0
"""Seconds that followers get to end by themselves."""

SPIN_S = 2e-4
"""Seconds that a follower on a GPU looks for its next step without a pause."""


@dataclass(frozen=True)
class Job:
    """The arguments of a follower's process.

    ring, store  file descriptors of the ring of plans and of the ranks' key-value store
    spin_s       seconds that a reader polls before it pauses
    """

    model: str
    config: EngineConfig
    rank: int
    size: int
    ring: int
    store: int
    spin_s: float


@dataclass(eq=False)
class Follower:
    """A follower's process, and what it has said: ("facts", Meeting), ("ready", None) or ("error", text)."""

    rank: int
    process: subprocess.Popen[bytes]
    said: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)
    error: str | None = None
    beats: int = -1
    silent: int = 0
    late: int = 0
    waited_for: int | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def tell(self, message: Any) -> None:
        """Send a message. Raises OSError if the process has ended."""
        assert self.process.stdin is not None
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def listen(self) -> None:
        """Take what it says until it ends."""
        assert self.process.stdout is not None
        with suppress(EOFError, OSError, pickle.UnpicklingError, ValueError):
            while True:
                kind, value = pickle.load(self.process.stdout)
                if kind == "error":
                    self.error = value
                self.said.put((kind, value))


class Crew:
    """The followers of rank 0. They end with it, and when it is closed.

    failure  why the ranks can compute nothing more; every later step raises it
    """

    def __init__(
        self, model: str, config: EngineConfig, device: torch.device, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.failure: EngineError | None = None
        self._wake = wake
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._loading = True
        size = config.tensor_parallel
        ring, store = new_memory("graftlm-plans", memory_bytes()), new_memory("graftlm-ranks", 0)
        self._ring_fd: int | None = ring
        self.ring = PlanRing(ring, 0, size)
        self.ranks = Ranks(0, size, device, f"/proc/self/fd/{store}", self.ring)
        self.ranks.meet = self._meet
        self.followers: list[Follower] = []
        try:
            for rank in range(1, size):
                spin_s = SPIN_S if device.type == "cuda" else 0.0
                job = Job(model, _for_follower(config, device, rank), rank, size, ring, store, spin_s)
                self.followers.append(_start(job, [ring, store]))
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="graftlm ranks", daemon=True).start()

    @classmethod
    def of(cls, model: Any, config: EngineConfig, wake: Callable[[], None] = lambda: None) -> Crew:
        """Start the followers of a model. Raises ConfigError before any weight is read if the ranks cannot run it."""
        name, device = check_ranks(model, config)
        return cls(name, config, device, wake)

    def over(self, spec: RunnerSpec) -> RunnerSpec:
        """Return a runner's specification with steps on all ranks, once the followers take steps."""
        self.ready()

        def check() -> None:
            self.check()
            spec.check_device()

        def close() -> None:
            self.close()
            spec.close()

        runner = TensorParallelRunner(self, spec.runner)
        return replace(spec, runner=runner, check_device=check, check_step=self.check, close=close, steps=None)

    def check(self) -> None:
        """Raise EngineError if a rank is gone."""
        if self.failure is not None:
            raise self.failure

    def forward(self, plan: WirePlan, own: Callable[[WirePlan], torch.Tensor]) -> torch.Tensor:
        """Run a step on all ranks. own: runs it on this one. -> its logits"""
        self.check()
        self.ring.write(plan, self.check)
        try:
            logits = own(plan)
            self.ring.done()
            return logits
        except BaseException as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> EngineError:
        """The ranks are at different places now: end the followers. -> the cause, which names a rank"""
        limit = time.monotonic() + 5 * TICK_S
        while self.failure is None and time.monotonic() < limit:  # the watch finds a dead follower
            time.sleep(TICK_S / 10)
        words = str(error).splitlines()[:1]
        self._fail(EngineError(f"a step failed on rank 0: {' '.join([type(error).__name__ + ':', *words])}"))
        assert self.failure is not None
        return self.failure

    def _fail(self, failure: EngineError) -> None:
        with self._lock:
            if self.failure is not None or self._closed.is_set():
                return
            self.failure = failure
        for follower in self.followers:
            follower.process.kill()
        self.ranks.abort()
        self._wake()

    # -- start and end ---------------------------------------------------------------------------------------------

    def _meet(self, mine: Meeting) -> Meeting:
        """Compare what all ranks have loaded. -> what they have in common. Raises ConfigError if they differ."""
        for follower in self.followers:
            mine = mine.common(self._said(follower, "facts"), follower.rank)
        for follower in self.followers:
            follower.tell(mine)
        return mine

    def ready(self) -> None:
        """Wait until all followers take steps."""
        for follower in self.followers:
            self._said(follower, "ready")
        self._loading = False

    def _said(self, follower: Follower, wanted: str) -> Any:
        limit = time.monotonic() + LOAD_S
        while time.monotonic() < limit:
            with suppress(queue.Empty):
                kind, value = follower.said.get(timeout=TICK_S)
                if kind == "refused":
                    raise value
                if kind == wanted:
                    return value
            if follower.said.empty():
                self.check()
        raise EngineError(f"{follower.name} has not loaded its part of the model in {LOAD_S:.0f} s")

    def close(self) -> None:
        """End the followers, and wait for their end."""
        self._closed.set()
        for follower in self.followers:
            with suppress(OSError, ValueError):
                assert follower.process.stdin is not None
                follower.process.stdin.close()
        limit = time.monotonic() + END_S
        for follower in self.followers:
            try:
                follower.process.wait(max(limit - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
            with suppress(OSError):
                assert follower.process.stdout is not None
                follower.process.stdout.close()
        self.ranks.close()
        if self._ring_fd is not None:
            # that of the store stays open: torch may write to its path when it frees the store, whatever is there then
            os.close(self._ring_fd)
            self._ring_fd = None

    # -- the watch -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(TICK_S) and self.failure is None:
            for follower in self.followers:
                trouble = self._trouble(follower)
                if trouble is not None:
                    self._fail(EngineError(f"{follower.name} {trouble}"))
                    break

    def _trouble(self, follower: Follower) -> str | None:
        code = follower.process.poll()
        if follower.error is not None:
            return f"failed: {follower.error}"
        if code is not None:
            return f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        beats = self.ring.beats(follower.rank)
        follower.silent = follower.silent + 1 if beats == follower.beats else 0
        follower.beats = beats
        if follower.silent > SILENT_TICKS * (SLOW_LOAD if self._loading else 1):
            return f"has not run for {follower.silent * TICK_S:.0f} s"
        awaited = self.ring.awaits(follower.rank)
        awaited = self.ring.owed_by(follower.rank) if awaited is None else -awaited
        follower.late = follower.late + 1 if awaited is not None and awaited == follower.waited_for else 0
        follower.waited_for = awaited
        if follower.late > LATE_TICKS:
            return f"hangs: rank 0 has waited for it for {follower.late * TICK_S:.0f} s"
        return None


class TensorParallelRunner:
    """Runs each step on all ranks; this one's `own` runner computes the logits."""

    def __init__(self, crew: Crew, own: Runner) -> None:
        self.crew = crew
        self.own = own

    def forward(self, plan: WirePlan) -> torch.Tensor:
        return self.crew.forward(plan, self.own.forward)


def check_ranks(model: Any, config: EngineConfig) -> tuple[str, torch.device]:
    """Return a model's name and the device of rank 0. Raises ConfigError for ranks that cannot run it."""
    size = config.tensor_parallel
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"tensor_parallel is {size}, which loads the model in {size} processes; give its name or folder, not a "
            "loaded model"
        )
    if not hasattr(os, "memfd_create"):
        raise ConfigError(f"tensor_parallel is {size}, which needs Linux; use tensor_parallel=1")
    if not sys.executable:
        raise ConfigError("this Python does not know its own program, which tensor_parallel starts")
    if config.loader != "hf":
        raise ConfigError(f"tensor_parallel is {size}, which loader={config.loader!r} does not support; leave it out")
    if config.quantization not in (None, *SCHEMES):
        raise ConfigError(
            f"tensor_parallel is {size}, which quantization={config.quantization!r} does not support; use one of "
            f"{', '.join(SCHEMES)}, or leave it out"
        )
    if config.trust_remote_code:
        raise ConfigError(f"tensor_parallel is {size}, which does not run a model's own code; leave it out")
    device = choose_device(config.device)
    if device.type == "cuda":
        _check_cards(config.device, device, size)
        device = torch.device("cuda", 0)
    name = os.fspath(model)
    source = resolve(name, revision=config.revision)
    ShardPlan.of(name, model_config(source, config), size)
    return name, device


def _check_cards(name: str, device: torch.device, size: int) -> None:
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"tensor_parallel is {size}, but this process has a group of torch.distributed already, of a launcher or "
            "of another runtime; start the script without the launcher, or close that runtime first"
        )
    if device.index is not None:
        raise ConfigError(f"device is {name!r}, but tensor_parallel={size} takes {size} GPUs; use device='cuda'")
    count = torch.cuda.device_count()
    if count < size:
        raise ConfigError(f"tensor_parallel is {size}, torch sees {count} GPU(s) here; use at most {count}")
    kinds = [torch.cuda.get_device_name(index) for index in range(size)]
    if len(set(kinds)) > 1:
        other = next(index for index, kind in enumerate(kinds) if kind != kinds[0])
        raise ConfigError(
            f"tensor_parallel is {size}, but the GPUs are of two kinds: {kinds[0]} (0) and {kinds[other]} ({other}); "
            "choose cards of one kind with CUDA_VISIBLE_DEVICES"
        )


def _for_follower(config: EngineConfig, device: torch.device, rank: int) -> EngineConfig:
    where = f"cuda:{rank}" if device.type == "cuda" else "cpu"
    return replace(config, device=where, quiet=True, cache=replace(config.cache, eviction="lru"), engine="local")


def _start(job: Job, fds: list[int]) -> Follower:
    process = python_process.start(
        ("-m", "graftlm.core.tensor_parallel.follower"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=fds,
        start_new_session=True,  # Ctrl-C is for rank 0
    )
    follower = Follower(job.rank, process)
    with suppress(OSError):  # it has ended: the watch says how
        follower.tell(job)
    threading.Thread(target=follower.listen, name=f"graftlm rank {job.rank}", daemon=True).start()
    return follower
