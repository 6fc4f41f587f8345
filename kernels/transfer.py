"""Copies of small arrays to a device and back that do not block on the device."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import torch

registration = threading.RLock()
"""Held while graphs are captured, and while host memory is registered with a driver: that would end a capture."""


def send(array: np.ndarray[Any, Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU array to `device`, after all earlier launches; the array may be changed immediately."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda":
        return tensor.to(device)
    # torch does not reuse the pinned copy before the device has read it
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if isinstance(array, np.ndarray):
        np.copyto(pinned.numpy(), array)  # torch's copy of a large array would use all threads, which then spin
    else:
        pinned.copy_(tensor)
    return pinned.to(device, non_blocking=True)


class Outgoing:
    """An array that the host fills and a device reads, without an intermediate copy.

    array  of `shape`, uninitialised
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], device: torch.device) -> None:
        self._device = device
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        self._tensor = torch.empty(shape, dtype=torch_dtype, pin_memory=device.type == "cuda")
        self.array: np.ndarray[Any, Any] = self._tensor.numpy()

    def send(self, num: int) -> torch.Tensor:
        """Return the first `num` along the first dimension on the device; the array may not be changed afterwards."""
        return self._tensor[:num].to(self._device, non_blocking=True)


@functools.cache
def copying_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return a stream for copies in one direction, "in" or "out": kernels need not wait 10 us for a copy."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)
    return stream


class Arriving:
    """A tensor that is copied to the CPU concurrently with later launches."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = self._source = tensor  # kept alive until it is copied
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            stream = copying_stream(tensor.device, "out")
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                self._host.copy_(tensor, non_blocking=True)
            self._event = stream.record_event()

    def wait(self) -> torch.Tensor:
        """Wait for the copy. Errors of the device in the meantime are raised."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
