"""A local engine whose device is a clock: steps take as long as measured on a GPU, and compute nothing.

Scheduler, prefix cache, tracker, writer and the engine's thread are the runtime's own. So the cost of callers
between two steps can be measured without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from graftlm import Runtime
from graftlm.core.config import EngineConfig
from graftlm.core.engine import LocalEngine
from graftlm.core.engine_builder import RunnerSpec
from graftlm.kernels.wire_plan import WirePlan
from graftlm.plugins import manager
from graftlm.plugins.hookspecs import Register, hookimpl

NUM_ROWS = (0, 1, 16, 64, 256)
DECODE_S = (0.0, 3.42e-3, 3.85e-3, 5.43e-3, 11.08e-3)
"""Seconds of a decode step by its number of rows: an 8B Llama on an H200 (docs/gpu-figures.md)."""

PROMPT_TOKEN_S = 1 / 40_518
HOST_CALLS = 24
PROMPT_CALLS = 320
"""Calls that a decode step (a CUDA graph) and one with prompts launch; each gives the GIL away for a moment."""
LOOPS = 500
"""Turns of an empty loop before each of them, about 10 us, in place of its Python code."""

WRITTEN = 70


class Clock:
    """A device that does one step after the other."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.busy_s = 0.0

    def launch(self, step_s: float) -> None:
        self.busy_s += step_s
        self.free_s = max(self.free_s, time.perf_counter()) + step_s


class PacedRunner:
    """Launches steps on a clock; logits of one column."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._buffer = torch.zeros(64)

    def forward(self, plan: WirePlan) -> torch.Tensor:
        rows = int((plan.num_new == 1).sum())
        for _ in range(HOST_CALLS if plan.is_decode else PROMPT_CALLS):
            for _ in range(LOOPS):
                pass
            self._buffer.add_(1)
        decode_s = max(float(np.interp(rows, NUM_ROWS, DECODE_S)), DECODE_S[1])
        prompt_s = (plan.num_tokens - rows) * PROMPT_TOKEN_S  # beside which the weights are read, once for both
        self.clock.launch(decode_s + max(0.0, prompt_s - DECODE_S[1]))
        return torch.zeros(len(plan.logits_rows), 1)


class Awaited:
    """Tokens that are available when the clock reaches their step."""

    def __init__(self, tokens: list[int], ready_s: float) -> None:
        self._tokens = tokens
        self._ready_s = ready_s

    def result(self) -> list[int]:
        time.sleep(max(0.0, self._ready_s - time.perf_counter()))
        return self._tokens


class PacedSampler:
    """Writes one token again and again; under a mask the first that it allows, or with `rng` one of them."""

    def __init__(self, clock: Clock, rng: np.random.Generator | None = None) -> None:
        self.clock = clock
        self.rng = rng
        self.device = torch.device("cpu")

    def takes(self, sequence: Any) -> bool:
        return True

    def draw(self, logits: torch.Tensor, sequences: Sequence[Any], masks: dict[int, Any]) -> Awaited:
        tokens = [WRITTEN] * len(sequences)
        for place, words in masks.items():
            some = np.flatnonzero(words)
            word = int(some[0] if self.rng is None else self.rng.choice(some))
            bits = int(words[word]) & 0xFFFFFFFF
            for _ in range(0 if self.rng is None else self.rng.integers(bits.bit_count())):
                bits &= bits - 1
            tokens[place] = 32 * word + (bits & -bits).bit_length() - 1
        return Awaited(tokens, self.clock.free_s)


class PacedPlugin:
    """The engine "paced", with the context and the number of slots of a GPU's pool."""

    def __init__(self, rng: np.random.Generator | None = None) -> None:
        self.clock = Clock()
        self.rng = rng

    @hookimpl
    def graftlm_register_engines(self, register: Register) -> None:
        register("paced", self.build)

    def build(self, model: Any, config: EngineConfig, *, tokenizer: Any, wake: Any) -> LocalEngine:
        size = tokenizer.vocab_size
        spec = RunnerSpec(
            PacedRunner(self.clock),
            num_slots=400_000,
            max_model_len=16_384,
            vocab_size=size,
            num_embeddings=size,
            step_tokens=16_384,
            device_sampler=PacedSampler(self.clock, self.rng),  # type: ignore[arg-type]
        )
        return LocalEngine(spec, tokenizer, config, wake=wake, finished=manager.load().request_finished)


@contextmanager
def paced_runtime(model: str = "sprout", rng: np.random.Generator | None = None) -> Iterator[tuple[Runtime, Clock]]:
    """Return a runtime with the tokenizer of `model` whose steps take a GPU's time, and its clock.

    rng  picks the tokens of rows under a grammar among those that it allows
    """
    registry, plugin = manager.load(), PacedPlugin(rng)
    registry.add("bench-paced", plugin)
    try:
        with Runtime(model, engine="paced") as runtime:
            yield runtime, plugin.clock
    finally:
        registry.remove("bench-paced")
