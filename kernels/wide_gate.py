"""Where the first product of an MLP takes in its gate in steps of 65 to 256 rows."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
import triton

MIN_ROWS = 65
MAX_ROWS = 256
_INPUTS = 64 * 7
"""The fewest inputs that fill all stages of the kernel."""


@functools.cache
def _kernel() -> ModuleType | None:
    """The kernel's module; None where Triton does not have what it is written in, as before 3.6."""
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
        return None
    try:
        from graftlm.kernels import triton_gated
    except ImportError:
        return None
    return triton_gated


def can_gate(weight: torch.Tensor) -> bool:
    """Whether `wide_gate` takes `weight` [2 n, k]: 16 bits on Hopper, n in eights, k in 64s and 448 at least."""
    device = weight.device
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    outputs, k = weight.shape
    shape = outputs % 16 == 0 and k % 64 == 0 and k >= _INPUTS
    dense = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return weight.dtype in (torch.bfloat16, torch.float16) and shape and dense and _kernel() is not None


def wide_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [num_rows, k] @ weight [2 n, k].T is both, the gates first. -> [num_rows, n]

    x contiguous, of the dtype of `weight`, which `can_gate`; 65 to 256 rows. Sums are in float32, and both factors
    rounded before they are multiplied, as separate kernels do.
    """
    kernel = _kernel()
    assert kernel is not None and MIN_ROWS <= len(x) <= MAX_ROWS
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    kernel.launch(x, weight, out)
    return out
