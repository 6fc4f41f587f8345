"""Programmatic dependent launch (PDL): a kernel is launched before the kernel before it has ended.

A kernel launched so calls `launch_dependents`, which lets the next kernel start, reads what no earlier kernel writes,
and calls `grid_wait`, which returns when all earlier kernels have ended. Only then does it read anything else, or
write. In steps of few rows this saves about half a microsecond a launch, and the latency of what is read early.

What may be read early is what no kernel launched with PDL ever writes: weights, the tables and lengths of a step,
cosines and sines. More than one earlier kernel may still be running then. A kernel behind an ordinary launch (all of
torch's are, and those that write tables) starts when that has ended, and sees what it wrote.

Every program calls `grid_wait`, even an idle one, so that a kernel's end implies the end of all kernels before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

MAX_ROWS = 512
"""Steps of more rows are launched the ordinary way."""


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def grid_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_and_wait(PDL: tl.constexpr):
    """Do both, in a kernel that reads nothing early."""
    launch_dependents(PDL)
    grid_wait(PDL)


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch: from Hopper on."""
    if device.type != "cuda" or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(x: torch.Tensor) -> dict[str, bool]:
    """Options for the launch over rows `x` [num_rows, ...] of a kernel that calls `grid_wait`."""
    pdl = len(x) <= MAX_ROWS and supports_pdl(x.device)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
