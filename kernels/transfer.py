"""Small arrays on their way to a device and back, without anyone waiting for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def send(array: np.ndarray[Any, Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put a CPU array on `device`, behind all that was launched there before; the array may be changed at once."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type != "cuda":
        return tensor.to(device)
    # torch gives the pinned copy to nobody else before the device has read it
    return tensor.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A tensor on its way to the CPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Wait until it is here. Raises what the device ran into meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
