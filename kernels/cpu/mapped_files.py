"""Memory that is mapped from files: weights that were copied elsewhere need not stay resident."""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import torch

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)


class MappedFiles:
    """The parts of this process's memory that lie in files, as they are now; on Linux, none elsewhere."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if not sys.platform.startswith("linux") or _DONT_NEED is None:
            return
        with suppress(OSError, ValueError):
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, _, _, _, inode, *_ = line.split()
                if inode != "0":
                    start, end = addresses.split("-")
                    self._ranges.append((int(start, 16), int(end, 16)))

    def release(self, x: torch.Tensor) -> int:
        """Drop the resident pages of `x`, which must be unchanged since it was read. -> bytes that were dropped

        The file stays in the system's cache, and whoever reads `x` again maps it again. Pages that `x` shares with
        others, at its ends, stay; so does memory that is in no file.
        """
        page = mmap.PAGESIZE
        start = -(-x.data_ptr() // page) * page
        end = (x.data_ptr() + x.numel() * x.itemsize) // page * page
        if not x.is_contiguous() or end <= start or not any(low <= start and end <= high for low, high in self._ranges):
            return 0
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return end - start if advise(start, end - start, _DONT_NEED) == 0 else 0
