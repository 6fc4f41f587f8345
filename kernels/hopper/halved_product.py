"""Products of 65 to 256 rows with as many inputs as outputs or more, as torch's library is fastest: in two halves.

With so few rows such a product has fewer tiles than a card has multiprocessors. The library then cuts its inputs by
itself, and sums up in a kernel of its own; the norm that comes next sums up without one. Measured on an H200.
"""

from __future__ import annotations

import torch

from graftlm.kernels.gpu.skinny_matmul import MAX_ROWS as FEW_ROWS

MAX_ROWS = 256


def is_halved(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether the product of so many rows with `weight` [n, k] is better summed from two halves."""
    n, k = weight.shape
    return FEW_ROWS < num_rows <= MAX_ROWS and k >= n and k % 2 == 0


def product_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What x [num_rows, k] @ weight [n, k].T is the sum of: one product for each half of k.

    x contiguous; k even -> [2, num_rows, n], dtype of x. Their sum is as close to the product as the product rounded
    to that dtype is.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    halves = x.view(num_rows, 2, k // 2).transpose(0, 1)
    return torch.bmm(halves, weight.view(n, 2, k // 2).permute(1, 2, 0))
