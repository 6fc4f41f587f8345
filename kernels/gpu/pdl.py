"""Launches that begin before the kernel before them has ended, where the card and Triton can.

A kernel that is launched so lets the next one set itself up (`announce`), reads what depends on none before it, and
waits until those have ended (`wait`). Only then does it read anything else, or write. In steps of few rows that saves
about half a microsecond a launch, and the latency of what is read early.

What may be read early is what no kernel launched so ever writes: weights, the tables and lengths of a step, cosines and
sines. More than one kernel before may still be running then, as each lets the next one begin before it waits itself.
Behind a kernel launched the ordinary way, as all of torch are and those that write tables, the next one begins when it
has ended; so what it has written is there. Every program waits, one with nothing to do as well: that a kernel has ended
has to mean that all before it have.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

MAX_ROWS = 512


@triton.jit
def announce(CHAINED: tl.constexpr):
    """Let the next kernel set itself up."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Wait for the kernels before."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Both, for a kernel that reads nothing early."""
    announce(CHAINED)
    wait(CHAINED)


@functools.cache
def can_chain(device: torch.device) -> bool:
    """Whether launches on `device` may be chained: from Hopper on."""
    if device.type != "cuda" or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def chain(x: torch.Tensor) -> dict[str, bool]:
    """Options of a launch over rows `x` [num_rows, ...] of a kernel that announces and waits."""
    chained = len(x) <= MAX_ROWS and can_chain(x.device)
    return {"CHAINED": True, "launch_pdl": True} if chained else {"CHAINED": False}
