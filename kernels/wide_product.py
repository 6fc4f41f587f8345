"""Products of 65 to 256 rows as torch's library is fastest at them: in two halves.

With so few rows a large product has about as many tiles as a card has multiprocessors, and how they fall on them
decides. Measured on an H200 with bfloat16 weights of 28,672 x 4,096 and 4,096 x 14,336.
"""

from __future__ import annotations

import torch

from graftlm.kernels.triton_stream import MAX_ROWS as FEW_ROWS

MAX_ROWS = 256
HALVES_ROWS = 225
"""From how many rows on halves of the outputs are faster than all at once; at 224 they are not."""

MIN_DEPTH = 2
"""How many times as many inputs as outputs a product has whose inputs are better halved."""


def is_wide(num_rows: int) -> bool:
    """Whether a step has as many rows as are meant here."""
    return FEW_ROWS < num_rows <= MAX_ROWS


def is_deep(weight: torch.Tensor) -> bool:
    """Whether a product with `weight` [n, k] is better summed from two halves of its inputs."""
    n, k = weight.shape
    return k >= MIN_DEPTH * n and k % 2 == 0


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [num_rows, k] @ weight [n, k].T -> [num_rows, n], dtype of x; the same as one product gives, in one or two."""
    num_rows, n = x.shape[0], weight.shape[0]
    if not HALVES_ROWS <= num_rows <= MAX_ROWS:
        return torch.nn.functional.linear(x, weight)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    for part in (slice(0, n // 2), slice(n // 2, n)):
        torch.mm(x, weight[part].t(), out=out[:, part])
    return out


def product_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What x [num_rows, k] @ weight [n, k].T is the sum of: one product for each half of k.

    x contiguous; k even -> [2, num_rows, n], dtype of x. Their sum is as close to the product as the product rounded
    to that dtype is.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    halves = x.view(num_rows, 2, k // 2).transpose(0, 1)
    return torch.bmm(halves, weight.view(n, 2, k // 2).permute(1, 2, 0))
