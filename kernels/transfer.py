"""Small arrays on their way to a device and back, without anyone waiting for the device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch


def send(array: np.ndarray[Any, Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put a CPU array on `device`, behind all that was launched there before; the array may be changed at once."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda":
        return tensor.to(device)
    # torch gives the pinned copy to nobody else before the device has read it
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if isinstance(array, np.ndarray):
        np.copyto(pinned.numpy(), array)  # torch would have all its threads copy a large one, and spin until the next
    else:
        pinned.copy_(tensor)
    return pinned.to(device, non_blocking=True)


class Outgoing:
    """An array that is filled here and read by a device, without a copy in between.

    array  of `shape`, with anything in it at first
    """

    def __init__(self, shape: tuple[int, ...], dtype: type[np.generic], device: torch.device) -> None:
        self._device = device
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        self._tensor = torch.empty(shape, dtype=torch_dtype, pin_memory=device.type == "cuda")
        self.array: np.ndarray[Any, Any] = self._tensor.numpy()

    def send(self, num: int) -> torch.Tensor:
        """The first `num` along the first dimension, on the device; the array may not be changed afterwards."""
        return self._tensor[:num].to(self._device, non_blocking=True)


@functools.cache
def copying_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """A stream for copies in one direction, "in" or "out": kernels beside them need not wait, which takes 10 us."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)
    return stream


class Arriving:
    """A tensor on its way to the CPU, beside what is launched later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = self._source = tensor  # which stays until it was copied
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            stream = copying_stream(tensor.device, "out")
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                self._host.copy_(tensor, non_blocking=True)
            self._event = stream.record_event()

    def wait(self) -> torch.Tensor:
        """Wait until it is here. Raises what the device ran into meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
