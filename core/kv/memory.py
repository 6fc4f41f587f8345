"""Memory budget: whether the weights fit on a device, and how many tokens of KV fit beside them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.kernels.wire_plan import RESERVED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from graftlm.core.loaded_model import LoadedModel

GPU_SHARE = 0.85  # of what the weights leave free; the rest is for the tensors of a step and its graphs
CPU_SHARE = 0.25  # others use a computer's memory too
DEFAULT_CONTEXTS = 64  # full contexts that the default CPU pool holds at most

STATES_PER_ROW = 2
"""States for each sequence that may run: its own, and a checkpoint of a cached prefix."""

STEP_TOKENS = 2048
LARGE_STEP_TOKENS = 8192
"""Prompt tokens of a large step: an H200 answers 256 requests of 512 tokens 5 % faster with it (bench/notes/gpu.md)."""

LARGE_STEP_FREE = 4_000_000_000
"""Bytes that are room enough for a large step, which holds one gigabyte of tensors with an 8B model, and for graphs."""

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The folder of the control group that limits a container's memory."""


def free_bytes(device: torch.device) -> int:
    """Memory that this process can still allocate on `device`, in bytes."""
    import torch

    if device.type != "cuda":
        return host_free_bytes()
    gc.collect()  # a closed runtime's store may lie in a circle of references
    torch.cuda.empty_cache()  # what torch keeps for later is free too
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)(index)  # new in torch 2.8
    return int(min(free, share * total - torch.cuda.memory_reserved(device)))


def host_free_bytes() -> int:
    """Memory of this machine that this process can still allocate, in bytes."""
    import psutil

    return int(min(psutil.virtual_memory().available, _container_bytes()))


def give_back() -> None:
    """Return freed memory to the system after loading or running a model: blocks of the C library, work space of MKL.

    Takes a millisecond or two where there is something to return.
    """
    from graftlm.kernels.cpu.compiled.openmp import torch_library

    with contextlib.suppress(OSError, AttributeError):
        torch_library().mkl_serv_free_buffers()
    trim_blocks()


def trim_blocks() -> None:
    """Return freed blocks of the C library to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def heaps_trimmed() -> Iterator[None]:
    """Let glibc return the free end of each thread's heap to the system while a model is loaded.

    By default it keeps up to 64 MiB of each, so a process that opens and closes models grows. Afterwards that is the
    limit, because a step frees and allocates the same blocks again and again. Blocks of 32 MiB or more are mapped on
    their own; smaller ones are not, because neighbouring weights share huge pages. Limits that the environment sets
    stay.
    """
    load = object()
    _loads.add(load)
    _set_limits(_LOADING)
    try:
        yield
    finally:
        _loads.discard(load)
        if not _loads:
            _set_limits(_RUNNING)


def trim_heap() -> None:
    """Return the free end of this thread's heap to the system, which malloc_trim leaves to glibc's limits."""
    if not _loads:
        _set_limits(_LOADING)
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.malloc.restype = ctypes.c_void_p
            library.free(ctypes.c_void_p(library.malloc(128 << 10)))  # a freed block of 64 KiB applies the limit
        _set_limits(_RUNNING)
    give_back()


_loads: set[object] = set()
_MAPPED = 32 << 20
"""Bytes of the smallest block that is mapped on its own."""
_LOADING, _RUNNING = 256 << 10, 64 << 20
"""Bytes of the free end of a heap that stay."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def _set_limits(free_end: int) -> None:
    if any(re.fullmatch("MALLOC_.*_", name) for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _MAPPED)
        library.mallopt(_TRIM_THRESHOLD, free_end)


def check_weights_fit(name: str, model: nn.Module, device: torch.device) -> None:
    """Raise a ModelError if the weights that are not on `device` yet are larger than its free memory.

    model  may be one that was described only, on torch's "meta" device
    """
    tensors = (tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    missing = {id(t) if t.is_meta else t.data_ptr(): t.nbytes for t in tensors if t.device.type != device.type}
    if not missing:
        return
    needed, free = sum(missing.values()), free_bytes(device)
    if needed > free:
        experts = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() == 3)
        share = f" ({size_of(experts)} of them experts)" if experts else ""
        where, other = (f"on {device}", "the GPU") if device.type == "cuda" else ("in this machine's memory", "it")
        raise ModelError(
            f"the weights of {name} take {size_of(needed)}{share}, {size_of(free)} are free {where}; use "
            f"dtype='bfloat16', quantization= or a smaller model, or end what else uses {other}"
        )


def may_be_too_large(source: str, device: torch.device) -> bool:
    """Whether a folder's weights might not fit: their files, in another dtype four times as large, take what is free.

    True where `source` is no folder.
    """
    files = [path for kind in ("*.safetensors", "*.bin") for path in Path(source).glob(kind)]
    return not files or 4 * sum(path.stat().st_size for path in files) > free_bytes(device)


def _container_bytes() -> float:
    """What the control group of this process may still allocate, in bytes; infinite without a limit."""
    group = CONTROL_GROUP
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # there is none, or it says "max"
        return math.inf
    return max(0, limit - used + (int(cached.group(1)) if cached else 0))


def num_states(loaded: LoadedModel, config: EngineConfig) -> int:
    """Slots in the pool of states: two for each sequence that may run, in at most half of the memory for the caches.

    Returns 0 for a model without layers that have a state. Raises ConfigError if not even one fits, or if the
    configuration asks for more than fit.
    """
    if loaded.states is None:
        return 0
    each, free = loaded.states.num_bytes, free_bytes(loaded.device)
    wanted = config.cache.states
    share = GPU_SHARE if loaded.device.type == "cuda" else CPU_SHARE
    room = free if wanted is not None else int(free * share) // 2
    fitting = room // each - RESERVED
    if fitting < (wanted or 1):
        raise ConfigError(
            f"{wanted or 1} states take {size_of((wanted or 1) * each)}, {size_of(free)} are free beside the weights: "
            f"{max(fitting, 0):,} sequences fit; set CacheConfig.states to at most that, use a smaller model or dtype, "
            "or end what else uses the memory"
        )
    return wanted if wanted is not None else min(STATES_PER_ROW * config.max_batch, fitting)


def pool_size(
    loaded: LoadedModel, cache: CacheConfig, bytes_per_token: int | None = None, reserved_bytes: int = 0
) -> int:
    """Slots in the KV pool: the least of what the configuration says, else a share of free memory.

    bytes_per_token  of KV as it is kept; None: in the model's own dtype
    reserved_bytes   of the free memory that the pool of states, their prefill and pictures take
    Raises ConfigError if not even two tokens fit, or if the configuration asks for more than is free.
    """
    bytes_per_token = max(loaded.bytes_per_token if bytes_per_token is None else bytes_per_token, 1)
    limits = []
    if cache.max_tokens is not None:
        limits.append(cache.max_tokens)
    if cache.max_bytes is not None:
        limits.append(cache.max_bytes // bytes_per_token)
    if cache.memory_share is not None:
        limits.append(int((free_bytes(loaded.device) - reserved_bytes) * cache.memory_share) // bytes_per_token)
    num_slots = min(limits) if limits else _default_slots(loaded, bytes_per_token, reserved_bytes)
    num_slots = num_slots // cache.page_size * cache.page_size
    if num_slots < max(2, cache.page_size):
        raise ConfigError(
            f"the KV pool would hold {num_slots} tokens; one token takes {bytes_per_token:,} bytes and "
            f"{size_of(free_bytes(loaded.device))} are free beside the weights: raise CacheConfig.max_tokens, "
            "max_bytes or memory_share, or use a smaller model or dtype, or end what else uses the memory"
        )
    if loaded.lane == "paged":
        share = GPU_SHARE if loaded.device.type == "cuda" else CPU_SHARE
        _check_pool_fits(num_slots, bytes_per_token, free_bytes(loaded.device) - reserved_bytes, share)
    return num_slots


def prefill_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Bytes that layers with a state take in a step of so many prompt tokens; 0 for a model without any."""
    return loaded.states.work_bytes(num_tokens) if loaded.states is not None else 0


def step_tokens(wanted: int | None, loaded: LoadedModel) -> int:
    """Prompt tokens that a step computes: `wanted`, or else what suits the memory that is left free on the device."""
    if wanted is not None:
        return wanted
    import torch

    device = loaded.device
    nvidia = device.type == "cuda" and torch.version.hip is None
    fast = nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
    needed = LARGE_STEP_FREE + prefill_bytes(loaded, LARGE_STEP_TOKENS)
    return LARGE_STEP_TOKENS if fast and free_bytes(device) >= needed else STEP_TOKENS


def _default_slots(loaded: LoadedModel, bytes_per_token: int, reserved_bytes: int) -> int:
    free = free_bytes(loaded.device) - reserved_bytes
    if loaded.device.type == "cuda":
        return int(free * GPU_SHARE) // bytes_per_token
    share = int(free * CPU_SHARE) // bytes_per_token
    return max(min(share, DEFAULT_CONTEXTS * loaded.max_model_len), min(loaded.max_model_len, math.ceil(share)))


def _check_pool_fits(num_slots: int, bytes_per_token: int, free: int, share: float) -> None:
    needed = num_slots * bytes_per_token
    if needed > free:
        raise ConfigError(
            f"a KV pool of {num_slots:,} tokens takes {size_of(needed)}, {size_of(free)} are free beside the weights; "
            f"lower CacheConfig.max_tokens or max_bytes to {int(free * share) // bytes_per_token:,} tokens, or "
            f"leave them out to take {share:.0%} of what is free"
        )


def size_of(num_bytes: float) -> str:
    """`num_bytes` in GB or MB, with the unit."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
