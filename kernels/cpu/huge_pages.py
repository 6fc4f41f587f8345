"""Weights in huge pages: a step reads all weights, and with pages of 4 KiB it waits for page table walks.

oneDNN allocates packed weights by malloc, piece by piece, so they cannot be in huge pages from the start. Linux can
move them there afterwards, during concurrent reads.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HUGE = 2 << 20
"""Bytes of a huge page of x86, and of ARM with pages of 4 KiB."""
_PIECE = 4 * HUGE
"""Bytes that are moved at once: it takes milliseconds."""
_WORTH = 8 * HUGE
_COLLAPSE = 25
"""Linux's MADV_COLLAPSE (6.1), which moves memory at once.

MADV_HUGEPAGE is not used: it would outlive the weights, and small allocations there would take 2 MiB each."""

Range = tuple[int, int]
"""First address, and the address after the last."""


def move_later(memory: Iterable[Range], owner: object, delay_s: float = 0.5) -> None:
    """Move memory into huge pages after a delay, in a thread that pauses between pieces and ends with `owner`.

    Memory small enough for the processor's caches is not moved.
    """
    memory = list(memory)
    pieces = pieces_of(blocks_of(memory)) if sum(end - start for start, end in memory) >= _WORTH else []
    if pieces:
        gone = threading.Event()
        weakref.finalize(owner, gone.set).atexit = False
        threading.Thread(target=_move_all, args=(pieces, gone, delay_s), name="graftlm huge pages", daemon=True).start()


def huge_buffer(num_bytes: int) -> torch.Tensor:
    """Allocate memory that begins at a huge page, and is in huge pages where Linux has them. -> uint8 [num_bytes]"""
    import torch

    # Python's default is a shared mapping, which Linux keeps in small pages.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, num_bytes + HUGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    return whole[first : first + num_bytes]


def blocks_of(memory: Iterable[Range]) -> list[Range]:
    """Return the joined ranges of whole huge pages around `memory` that contain no other mapping."""
    mapped = _anonymous()
    numbers = {n for start, end in memory for n in range(start // HUGE, -(-end // HUGE))}
    blocks: list[Range] = []
    for start, end in ((n * HUGE, (n + 1) * HUGE) for n in sorted(numbers)):
        if not any(low <= start and end <= high for low, high in mapped):
            continue
        if blocks and blocks[-1][1] == start and not any(low == start for low, _ in mapped):
            blocks[-1] = blocks[-1][0], end
        else:
            blocks.append((start, end))
    return blocks


def pieces_of(blocks: Iterable[Range]) -> list[Range]:
    """Cut `blocks` into pieces that are moved at once."""
    return [(at, min(at + _PIECE, end)) for start, end in blocks for at in range(start, end, _PIECE)]


def move(start: int, end: int) -> bool:
    """Move a range of whole huge pages, content unchanged; False if unsupported or not mapped."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(advise(start, end - start, _COLLAPSE) == 0)


def _move_all(pieces: list[Range], gone: threading.Event, pause_s: float) -> None:
    """Move pieces until the owner of the memory is gone: freed memory would be filled with zeros."""
    for start, end in pieces:
        if gone.wait(pause_s):
            return
        began_s = time.monotonic()
        if not move(start, end):
            return
        pause_s = time.monotonic() - began_s


def _anonymous() -> list[Range]:
    """Return the writable anonymous memory of this process; none on systems other than Linux."""
    found: list[Range] = []
    if sys.platform.startswith("linux"):
        with suppress(OSError, ValueError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, rights, _, _, inode, *_ = line.split()
                if inode == "0" and rights.startswith("rw"):
                    start, end = addresses.split("-")
                    found.append((int(start, 16), int(end, 16)))
    return found
