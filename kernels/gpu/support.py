"""Support of a device for the Triton kernels, and its resources."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch

OLDEST = (8, 0)
"""The oldest compute capability: Ampere has bfloat16 arithmetic and enough shared memory for the kernels' blocks."""

OLDEST_TRITON = (3, 4)
"""The oldest Triton, of PyTorch 2.8: it has programmatic dependent launch and `triton.knobs`."""


def triton_problem(device: torch.device) -> str | None:
    """Return the reason why the Triton kernels cannot run on `device`; None if they can."""
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
    """Return the major and minor version of the installed Triton."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


SLOW_MEMORY = 4e12
"""Bytes a second, between the memory rates of an H100 and an H200."""


def memory_rate(device: torch.device) -> float:
    """Return the bytes a second of a GPU's memory; 0 if torch does not report them."""
    card = torch.cuda.get_device_properties(device)
    return (
        250.0 * getattr(card, "memory_clock_rate", 0) * getattr(card, "memory_bus_width", 0)
    )  # kHz, bits, two a clock


class Card(NamedTuple):
    """The resources of a card. num_sms: multiprocessors; shared_memory: bytes available to a program."""

    num_sms: int
    shared_memory: int


@functools.cache
def card_of(device: torch.device) -> Card:
    """Return the resources of `device`; for a CPU, those of a small card with plenty of shared memory."""
    if device.type != "cuda":
        return Card(1, 1 << 18)
    import triton

    index = torch.cuda.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return Card(found["multiprocessor_count"], found["max_shared_mem"] - 1024)
