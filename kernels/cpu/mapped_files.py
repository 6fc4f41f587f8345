"""Release of the memory of weights that were copied elsewhere, mapped from files or not."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)
_PAUSE_S = 0.03
"""Seconds between two releases, in which a few dozen megabytes are read and converted."""


class MappedFiles:
    """The file mappings of this process at construction; none on systems other than Linux.

    only  the files that count; None: all
    """

    def __init__(self, only: Collection[str] | None = None) -> None:
        self._ranges: list[tuple[int, int]] = []
        if not sys.platform.startswith("linux") or _DONT_NEED is None:
            return
        with suppress(OSError, ValueError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, _, _, _, inode, *path = line.split(maxsplit=5)
                if inode != "0" and (only is None or path[0] in only):
                    start, end = addresses.split("-")
                    self._ranges.append((int(start, 16), int(end, 16)))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __contains__(self, x: torch.Tensor) -> bool:
        """Return True if `x` begins in a file mapping."""
        return any(low <= x.data_ptr() < high for low, high in self._ranges)

    def release(self, x: torch.Tensor) -> int:
        """Drop the resident pages of `x`, which must be unchanged since it was read. -> dropped bytes

        The file stays in the system's cache, and a later read of `x` maps it again. Pages at the ends of `x` that
        contain other data stay, as does memory outside of files.
        """
        start, end = _whole_pages(x)
        if not x.is_contiguous() or end <= start or not any(low <= start and end <= high for low, high in self._ranges):
            return 0
        return end - start if _drop(start, end) else 0

    def release_all(self) -> None:
        """Drop all resident pages, which must be unchanged since they were read."""
        for start, end in self._ranges:
            _drop(start, end)


def discard(x: torch.Tensor) -> None:
    """Return the memory of `x`, dense, to the system where supported; its content is lost.

    Pages at the ends of `x` that contain other data stay.
    """
    start, end = _whole_pages(x)
    if sys.platform.startswith("linux") and _DONT_NEED is not None and end > start:
        _drop(start, end)


def _whole_pages(x: torch.Tensor) -> tuple[int, int]:
    """Return the address range of the pages that hold only `x`, dense; stop <= start if there is none."""
    page = mmap.PAGESIZE
    return -(-x.data_ptr() // page) * page, (x.data_ptr() + x.nbytes) // page * page


def _drop(start: int, end: int) -> bool:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(advise(start, end - start, _DONT_NEED) == 0)


@contextmanager
def read_once(paths: Collection[Path]) -> Iterator[None]:
    """Within the context, drop the resident pages of files repeatedly, while other code maps and converts them.

    Writes to the mapped memory would be lost, hence files that are mapped already are excluded.
    """
    names = {name for name in map(os.path.realpath, paths) if not MappedFiles({name})}
    ended = threading.Event()

    def drop() -> None:
        while not ended.wait(_PAUSE_S):
            MappedFiles(names).release_all()

    thread = threading.Thread(target=drop, name="graftlm mapped files", daemon=True)
    if names:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if names:
            thread.join()
