"""One forward of a model, and how much KV there is room for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.plan import StepPlan
from graftlm.core.prefix_cache import SnapshotLane

if TYPE_CHECKING:
    import torch

    from graftlm.core.model import LoadedModel
    from graftlm.core.qualify import AttentionFactory

DEFAULT_CONTEXTS = 64  # full contexts that the default CPU pool holds at most
MEMORY_SHARE = 0.25  # of free memory, for the default CPU pool


class Runner(Protocol):
    """Runs the rows of a plan; logits [num_logits, vocab_size]."""

    def forward(self, plan: StepPlan) -> torch.Tensor: ...


@dataclass(frozen=True)
class RunnerSpec:
    """A runner and what the engine must know to feed it.

    lane        set where the runner keeps prefixes itself (the serial lane).
    min_forced  the shortest run of forced tokens worth a longer step on this device.
    """

    runner: Runner
    num_slots: int
    max_model_len: int
    vocab_size: int
    lane: SnapshotLane | None = None
    min_forced: int = 1


def build_runner(loaded: LoadedModel, config: EngineConfig, kernels: Mapping[str, AttentionFactory]) -> RunnerSpec:
    """Allocate the KV pool and put a runner over it, with the attention that the configuration names."""
    num_slots = pool_size(loaded, config.cache)
    if loaded.lane == "serial":
        from graftlm.core.serial import SerialRunner

        serial = SerialRunner(loaded)
        return RunnerSpec(serial, num_slots, loaded.max_model_len, loaded.vocab_size, lane=serial)
    from graftlm.core.model import KVStore, PagedRunner

    name = "torch" if config.attention == "auto" else config.attention
    factory = kernels[name]
    attention = factory(KVStore(loaded.kv_layout, num_slots, loaded.dtype, loaded.device))
    for layer in loaded.layers:
        if reason := attention.supports(layer):
            raise ConfigError(f"attention {name!r} cannot run {loaded.name}: {reason}; use attention='auto'")
    runner = PagedRunner(loaded, attention)
    return RunnerSpec(runner, num_slots, loaded.max_model_len, loaded.vocab_size)


def pool_size(loaded: LoadedModel, cache: CacheConfig) -> int:
    """Slots in the pool: what the configuration says, else a share of free memory."""
    bytes_per_token = max(loaded.bytes_per_token, 1)
    limits = []
    if cache.max_tokens is not None:
        limits.append(cache.max_tokens)
    if cache.max_bytes is not None:
        limits.append(cache.max_bytes // bytes_per_token)
    if not limits:
        limits.append(_default_slots(loaded, bytes_per_token))
    num_slots = min(limits) // cache.page_size * cache.page_size
    if num_slots < 2:
        raise ConfigError(
            f"the KV pool would hold {num_slots} tokens; one token takes {bytes_per_token:,} bytes: "
            "raise CacheConfig.max_tokens or max_bytes"
        )
    return num_slots


def _default_slots(loaded: LoadedModel, bytes_per_token: int) -> int:
    import psutil

    share = int(psutil.virtual_memory().available * MEMORY_SHARE) // bytes_per_token
    return max(min(share, DEFAULT_CONTEXTS * loaded.max_model_len), min(loaded.max_model_len, math.ceil(share)))
