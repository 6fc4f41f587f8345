"""The tiers that a configuration asks for: checked before weights are read, built once the KV store exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.kv.memory import host_free_bytes, size_of
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS

if TYPE_CHECKING:
    import torch

    from graftlm.core.kv.tiers.block_copier import BlockCopier
    from graftlm.core.kv.tiers.loads import HostTier
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.kv_store import KVStore
    from graftlm.kernels.recurrent.state_pool import StatePool

STATE_SHARE = 1 / 2
"""Share of host memory for states, in a model that has layers with one."""


def check_host_bytes(config: EngineConfig) -> None:
    """Raise ConfigError if the configuration asks for more host memory than is free, or has no cache to keep."""
    wanted = config.cache.host_bytes
    if wanted is None:
        return
    if not config.cache.enabled:
        raise ConfigError("CacheConfig has host_bytes and enabled=False; a cache that is off evicts nothing: drop one")
    free = host_free_bytes()
    if wanted > free:
        raise ConfigError(
            f"CacheConfig.host_bytes is {size_of(wanted)}, {size_of(free)} of this machine's memory are free; lower "
            "it, or end what else uses the memory"
        )


def refuse_tiers(loaded: LoadedModel, config: EngineConfig) -> None:
    """Raise ConfigError if the configuration has a tier for a model in the serial lane."""
    if config.cache.host_bytes is not None:
        raise ConfigError(
            f"CacheConfig.host_bytes is set, but {loaded.name} runs in the serial lane ({loaded.lane_reason}), which "
            "keeps whole snapshots of the model's own cache: leave it out"
        )


def host_tier(config: EngineConfig, store: KVStore, pool: StatePool | None, *, max_tokens: int) -> HostTier | None:
    """Allocate host memory for evicted KV, and for states if `pool` is given; None if the configuration has none.

    max_tokens  of a prompt
    Raises ConfigError if host_bytes holds less than one prompt.
    """
    from graftlm.core.kv.tiers.block_copier import BlockCopier, BlockLayout
    from graftlm.core.kv.tiers.host_memory import HostRows
    from graftlm.core.kv.tiers.loads import HostTier
    from graftlm.kernels.kv_store import all_parts

    wanted = config.cache.host_bytes
    if wanted is None:
        return None

    def copier_of(parts: list[torch.Tensor], tokens: int) -> BlockCopier:
        return BlockCopier(parts, BlockLayout(parts, tokens))

    blocks = copier_of(all_parts(store), BLOCK_TOKENS)
    states = copier_of(pool.parts, 1) if pool is not None else None
    state_rows = int(wanted * STATE_SHARE) // states.layout.num_bytes if states is not None else 0
    num_rows = (wanted - state_rows * (states.layout.num_bytes if states is not None else 0)) // blocks.layout.num_bytes
    if num_rows < 1 or (states is not None and state_rows < 1):
        least = blocks.layout.num_bytes + (states.layout.num_bytes / STATE_SHARE if states is not None else 0)
        raise ConfigError(
            f"CacheConfig.host_bytes is {size_of(wanted)}, one block of {BLOCK_TOKENS} tokens of this model takes "
            f"{size_of(least)}; raise it to {size_of(least * max(max_tokens // BLOCK_TOKENS, 1))}, one full context, "
            "or leave it out"
        )
    rows = HostRows(num_rows, blocks.layout.num_bytes, store.device)
    if states is None:
        return HostTier(blocks, rows)
    return HostTier(blocks, rows, states, HostRows(state_rows, states.layout.num_bytes, store.device))
