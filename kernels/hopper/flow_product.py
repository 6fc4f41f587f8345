"""Where products of up to 64 rows are read without a pause (prefetch_matmul.py) instead of by gpu/skinny_matmul.py."""

from __future__ import annotations

import torch

from graftlm.kernels.hopper.support import gluon_kernel, takes

MAX_ROWS = 64
_MAX_PARTS = 8
_INPUTS = 64 * 2
"""Of a step: two reads of 128 bytes of each output's weights, right after each other."""


def num_parts(n: int, k: int, device: torch.device) -> int:
    """Into how many parts the k inputs of n outputs are cut: as many as let all programs run at once."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return min(max(sms // -(-n // 64), 1), _MAX_PARTS, -(-k // _INPUTS))


def can_flow(weight: torch.Tensor) -> bool:
    """Whether these products take `weight` [n, k]: 16 bits on Hopper, dense, k in 64s."""
    return takes(weight) and gluon_kernel("hopper.prefetch_matmul") is not None


def flow_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [num_rows, k] @ weight [n, k].T + bias [n]. -> [num_rows, n], dtype of x

    x contiguous, of the dtype of `weight`, which `can_flow`; up to 64 rows. Sums are in float32.
    """
    out = torch.empty(1, x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, out, bias)
    return out[0]


def flow_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What x [num_rows, k] @ weight [n, k].T is the sum of. -> float32 [num_parts, num_rows, n]"""
    n, k = weight.shape
    out = torch.empty(num_parts(n, k, x.device), x.shape[0], n, dtype=torch.float32, device=x.device)
    _launch(x, weight, out, None)
    return out


def _launch(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    kernel = gluon_kernel("hopper.prefetch_matmul")
    assert kernel is not None and len(x) <= MAX_ROWS
    kernel.launch(x, weight, out, bias)
