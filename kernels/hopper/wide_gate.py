"""Where the first product of an MLP takes in its gate in steps of more than 32 rows. Measured on an H200."""

from __future__ import annotations

from types import ModuleType

import torch

from graftlm.kernels.hopper.support import gluon_kernel, takes

READ_ONCE = range(33, 257)
"""Of so many rows the weight is read once (hopper/gate_up_silu_decode.py)."""

MANY_ROWS = 513
"""From so many on it is read more often (hopper/gate_up_silu_prefill.py)."""

ONE_OF_EACH = (64, 96, 128, 160, 192, 256, MANY_ROWS)
"""Numbers of rows that are multiplied in different ways."""


def kernel_of(num_rows: int) -> ModuleType | None:
    """What multiplies so many rows; None where Triton does not have what it is written in."""
    return gluon_kernel(f"hopper.gate_up_silu_{'prefill' if num_rows >= MANY_ROWS else 'decode'}")


def can_gate(weight: torch.Tensor) -> bool:
    """Whether `wide_gate` takes `weight` [2 n, k]: 16 bits on Hopper, dense, n in eights, k in 64s."""
    return takes(weight) and weight.shape[0] % 16 == 0 and all(kernel_of(n) is not None for n in ONE_OF_EACH)


def is_gated(num_rows: int) -> bool:
    """Whether a product of so many rows is faster with the gate inside; of 257 to 512 rows the library's is."""
    return num_rows in READ_ONCE or num_rows >= MANY_ROWS


def wide_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [num_rows, k] @ weight [2 n, k].T is both, the gates first. -> [num_rows, n]

    x contiguous, of the dtype of `weight`, which `can_gate`; so many rows that it `is_gated`. Sums are in float32, and
    both factors rounded before they are multiplied, as separate kernels do.
    """
    kernel = kernel_of(len(x))
    assert kernel is not None and is_gated(len(x))
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    kernel.launch(x, weight, out)
    return out
