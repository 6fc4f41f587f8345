"""HostRows: rows of host memory that a device can copy from and to."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from graftlm.kernels.transfer import registration

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("graftlm.cache")

REGISTERED_BYTES = 1 << 27
"""Bytes that are registered with the device in one call, which takes some 0.05 s."""


class HostRows:
    """`num_rows` rows of `row_bytes` in one anonymous mapping; untouched rows cost no memory on a CPU.

    For a GPU `register` has the pages registered with its driver, on a thread, a gigabyte in some 0.4 s; call it when
    the runtime's graphs are captured. torch's own pinned memory would be rounded up to a power of two.

    num_ready  rows that can be used now, the first ones
    """

    def __init__(self, num_rows: int, row_bytes: int, device: torch.device) -> None:
        self.num_rows = num_rows
        stride = -(-row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # no row lies in two registrations
        self._memory = mmap.mmap(-1, max(num_rows, 1) * stride)
        self._device = device
        self._data = data = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._rows = data[: num_rows * stride].view(num_rows, stride)[:, :row_bytes]
        self.num_ready = num_rows if device.type != "cuda" else 0
        self._stride = stride
        self._ends = False
        self._thread: threading.Thread | None = None
        self._registered: list[int] = []

    def register(self) -> None:
        """Begin to register the memory with the driver of a GPU."""
        if self._device.type == "cuda" and self._thread is None:
            self._thread = threading.Thread(target=self._register, args=(self._data, self._device), daemon=True)
            self._thread.start()

    def pieces(self, indices: Sequence[int]) -> list[Tensor]:
        """Return rows by their indices, uint8 [num_rows, row_bytes] each: rows that lie together in one tensor.

        A tensor is copied at once, so none is in two registrations.
        """
        if self._stride != self._rows.shape[1]:
            return [self._rows[index : index + 1] for index in indices]
        most, pieces, start = max(REGISTERED_BYTES // self._stride, 1), [], 0
        for place in range(1, len(indices) + 1):
            first = indices[start]
            together = place < len(indices) and indices[place] == first + place - start
            if not together or indices[place] // most != first // most:
                pieces.append(self._rows[first : first + place - start])
                start = place
        return pieces

    def row(self, index: int) -> Tensor:
        """Return a row, uint8 [row_bytes]."""
        return self._rows[index]

    def close(self) -> None:
        """Take the memory from the driver; no copy may be under way."""
        self._ends = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for address in self._registered:
            with registration:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()

    def _register(self, data: Tensor, device: torch.device) -> None:
        try:
            with torch.cuda.device(device):
                piece = max(REGISTERED_BYTES // self._stride, 1) * self._stride  # whole rows
                for start in range(0, len(data), piece):
                    if self._ends:
                        return
                    size = min(piece, len(data) - start)
                    with registration:
                        code = torch.cuda.cudart().cudaHostRegister(data.data_ptr() + start, size, 0)
                    if int(code) != 0:
                        raise RuntimeError(f"cudaHostRegister of {size:,} bytes returned {int(code)}")
                    self._registered.append(data.data_ptr() + start)
                    self.num_ready = min((start + size) // self._stride, self.num_rows)
        except Exception as error:
            log.warning(
                "%d of %d bytes of host memory for the cache were registered with the GPU: %s; lower "
                "CacheConfig.host_bytes, or raise the limit of locked memory (ulimit -l)",
                self.num_ready * self._stride,
                self.num_rows * self._stride,
                error,
            )
