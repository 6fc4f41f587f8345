"""Whether the Triton kernels can run on a device, and what it has."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch

OLDEST = (8, 0)
"""Ampere: the first to compute in bfloat16, and the first that the kernels' block sizes fit."""

OLDEST_TRITON = (3, 4)
"""Comes with PyTorch 2.8: the first with programmatic dependent launch, and with `triton.knobs`."""


def triton_problem(device: torch.device) -> str | None:
    """Why they cannot; None if they can."""
    if device.type != "cuda":
        return f"Triton needs a GPU, this is {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if triton_version() < OLDEST_TRITON:
        return f"the kernels need Triton {'.'.join(map(str, OLDEST_TRITON))}, {triton.__version__} is installed"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST:
        has, needs = (".".join(map(str, version)) for version in (capability, OLDEST))
        return f"the kernels need compute capability {needs}, {torch.cuda.get_device_name(device)} has {has}"
    return None


def triton_version() -> tuple[int, ...]:
    """Major and minor number of the Triton that is installed."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


SLOW_MEMORY = 4e12
"""Bytes a second: an H100's memory has fewer, an H200's more."""


def memory_rate(device: torch.device) -> float:
    """Bytes a second of a GPU's memory; 0 where torch does not say."""
    card = torch.cuda.get_device_properties(device)
    return (
        250.0 * getattr(card, "memory_clock_rate", 0) * getattr(card, "memory_bus_width", 0)
    )  # kHz, bits, two a clock


class Card(NamedTuple):
    """num_sms: multiprocessors; shared_memory: bytes of it that a program can have."""

    num_sms: int
    shared_memory: int


@functools.cache
def card_of(device: torch.device) -> Card:
    """The resources of `device`; one without GPU kernels counts as a small card with plenty of shared memory."""
    if device.type != "cuda":
        return Card(1, 1 << 18)
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return Card(found["multiprocessor_count"], found["max_shared_mem"] - 1024)
