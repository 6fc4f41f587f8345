"""Programmatic dependent launch (PDL): a kernel is launched before the previous kernel has ended.

A kernel with PDL calls `launch_dependents`, which lets the next kernel start, reads memory that no earlier kernel
writes, and calls `grid_wait`, which returns when all earlier kernels have ended. Only then does it read other memory,
or write. In steps of few rows this saves about half a microsecond a launch, and the latency of the early reads.

Early reads are limited to memory that no kernel with PDL ever writes: weights, the tables and lengths of a step,
cosines and sines. Several earlier kernels may still be running then. A kernel after an ordinary launch (all of torch's
kernels, and the kernels that write tables) starts when that kernel has ended, and sees its writes. A kernel whose
predecessor calls `grid_wait` before `launch_dependents` sees the writes of all kernels before that one
(codes/experts.py).

Every program calls `grid_wait`, even an idle one, so that a kernel's end implies the end of all kernels before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

MAX_ROWS = 512
"""The largest number of rows of a launch with PDL; larger steps use ordinary launches."""


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
    """Call `launch_dependents` and `grid_wait`, in a kernel without early reads."""
    launch_dependents(PDL)
    grid_wait(PDL)


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return True if `device` supports programmatic dependent launch: Hopper and later."""
    if device.type != "cuda" or not hasattr(tl.extra.cuda, "gdc_wait"):
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(x: torch.Tensor) -> dict[str, bool]:
    """Return the launch options over rows `x` [num_rows, ...] of a kernel that calls `grid_wait`."""
    pdl = len(x) <= MAX_ROWS and supports_pdl(x.device)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
