"""Launches that begin before the kernel before them has ended, where the card and Triton can.

A kernel that is launched so calls `begin` before it reads or writes anything that other kernels do: until then it only
sets itself up, while the last programs of the kernel before it still run. That saves about half a microsecond a launch
in steps of few rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

MAX_ROWS = 512


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Wait for the kernel before, and let the next one set itself up."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def can_chain(device: torch.device) -> bool:
    """Whether launches on `device` may be chained: from Hopper on."""
    if device.type != "cuda" or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def chain(x: torch.Tensor) -> dict[str, bool]:
    """Options of a launch over rows `x` [num_rows, ...] of a kernel that calls `begin`."""
    chained = len(x) <= MAX_ROWS and can_chain(x.device)
    return {"CHAINED": True, "launch_pdl": True} if chained else {"CHAINED": False}
