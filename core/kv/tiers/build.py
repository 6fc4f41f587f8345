"""The tiers that a configuration asks for: checked before weights are read, built once the KV store exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.kv.memory import host_free_bytes, size_of
from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS
from graftlm.core.kv.tiers.context import check_folder, context_of

if TYPE_CHECKING:
    import torch

    from graftlm.core.kv.tiers.folder import BlockFolder
    from graftlm.core.kv.tiers.loads import HostTier
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.attention import Attention
    from graftlm.kernels.kv_store import KVStore
    from graftlm.kernels.recurrent.state_pool import StatePool

STATE_SHARE = 1 / 2
"""Share of host memory for states, in a model that has layers with one."""

FOLDER_HOST_BYTES = 256 << 20
"""Bytes of host memory in front of a folder, at least; two full contexts if these take more."""

FOLDER_HOST_SHARE = 1 / 8
"""Share of the free memory that they take at most."""

LEAST_BLOCKS = 16
"""Blocks that a folder must have room for."""


def check_tiers(config: EngineConfig) -> None:
    """Raise ConfigError for tiers that cannot be had: more memory than is free, a folder of others, without a cache.

    Called before weights are read.
    """
    cache = config.cache
    if cache.host_bytes is None and cache.folder is None:
        return
    if not cache.enabled:
        name = "host_bytes" if cache.host_bytes is not None else "folder"
        raise ConfigError(f"CacheConfig has {name} and enabled=False; a cache that is off evicts nothing: drop one")
    if config.tensor_parallel > 1:
        name = "host_bytes" if cache.host_bytes is not None else "folder"
        raise ConfigError(
            f"CacheConfig.{name} is set with tensor_parallel={config.tensor_parallel}, and tiers keep the KV of one "
            "card only: leave one of them out"
        )
    check_folder(config)
    free = host_free_bytes()
    if cache.host_bytes is not None and cache.host_bytes > free:
        raise ConfigError(
            f"CacheConfig.host_bytes is {size_of(cache.host_bytes)}, {size_of(free)} of this machine's memory are "
            "free; lower it, or end what else uses the memory"
        )


def refuse_tiers(loaded: LoadedModel, config: EngineConfig) -> None:
    """Raise ConfigError if the configuration has a tier for a model in the serial lane."""
    for name in ("host_bytes", "folder"):
        if getattr(config.cache, name) is not None:
            raise ConfigError(
                f"CacheConfig.{name} is set, but {loaded.name} runs in the serial lane ({loaded.lane_reason}), which "
                "keeps whole snapshots of the model's own cache: leave it out"
            )


def host_tier(config: EngineConfig, store: KVStore, pool: StatePool | None, *, max_tokens: int) -> HostTier | None:
    """Allocate host memory for evicted KV, and for states if `pool` is given; None if the configuration has no tier.

    max_tokens  of a prompt
    Raises ConfigError if host_bytes holds not one block.
    """
    if config.cache.host_bytes is None and config.cache.folder is None:
        return None
    from graftlm.core.kv.tiers.block_copier import BlockCopier, BlockLayout
    from graftlm.core.kv.tiers.host_memory import HostRows
    from graftlm.core.kv.tiers.loads import HostTier
    from graftlm.kernels.kv_store import all_parts

    def copier_of(parts: list[torch.Tensor], tokens: int) -> BlockCopier:
        return BlockCopier(parts, BlockLayout(parts, tokens))

    blocks = copier_of(all_parts(store), BLOCK_TOKENS)
    states = copier_of(pool.parts, 1) if pool is not None else None
    block_bytes, state_bytes = blocks.layout.num_bytes, states.layout.num_bytes if states is not None else 0
    wanted = config.cache.host_bytes
    if wanted is None:
        two = 2 * (-(-max_tokens // BLOCK_TOKENS) * block_bytes + state_bytes) + 2 * state_bytes
        wanted = min(max(FOLDER_HOST_BYTES, two), int(FOLDER_HOST_SHARE * host_free_bytes()))
    num_states = int(wanted * STATE_SHARE) // state_bytes if state_bytes else 0
    num_blocks = (wanted - num_states * state_bytes) // block_bytes
    if num_blocks < 1 or (state_bytes and num_states < 1):
        least = block_bytes + state_bytes / STATE_SHARE
        raise ConfigError(
            f"CacheConfig.host_bytes is {size_of(wanted)}, one block of {BLOCK_TOKENS} tokens of this model takes "
            f"{size_of(least)}; raise it to {size_of(least * max(max_tokens // BLOCK_TOKENS, 1))}, one full context, "
            "or leave it out"
        )
    rows = HostRows(num_blocks, block_bytes, store.device)
    if states is None:
        return HostTier(blocks, rows)
    return HostTier(blocks, rows, states, HostRows(num_states, state_bytes, store.device))


def folder_tier(
    config: EngineConfig, loaded: LoadedModel, attention: Attention, host: HostTier | None, identity: str
) -> BlockFolder | None:
    """Open the folder of the configuration; None if it has none.

    identity  of the weights
    Raises ConfigError if folder_bytes is too small for this model.
    """
    root = check_folder(config)
    if root is None or host is None:
        return None
    from graftlm.core.kv.tiers.folder import BlockFolder

    layout = str(host.copier.layout)
    least = LEAST_BLOCKS * host.copier.layout.num_bytes
    if host.state_copier is not None:
        layout += f"; states {host.state_copier.layout}"
        least += host.state_copier.layout.num_bytes
    if config.cache.folder_bytes < least:
        raise ConfigError(
            f"CacheConfig.folder_bytes is {size_of(config.cache.folder_bytes)}, {LEAST_BLOCKS} blocks of "
            f"{BLOCK_TOKENS} tokens of {loaded.name} take {size_of(least)}; raise it, or leave the folder out"
        )
    return BlockFolder(root, context_of(identity, loaded, config, attention, layout), config.cache.folder_bytes)
