"""A product in halves gives what one product gives."""

import pytest
import torch
from torch.nn.functional import linear

from graftlm.kernels.hopper.halved_product import is_halved, product_halves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_the_inputs_add_up(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(n, 96, device=DEVICE).to(dtype) for n in (70, 40))
    exact = x.double() @ weight.double().T
    parts = product_halves(x, weight)
    assert parts.shape == (2, 70, 40) and parts.dtype == dtype and parts[0].is_contiguous()
    error, rounded = ((y.double() - exact).norm() / exact.norm() for y in (parts.float().sum(0), linear(x, weight)))
    assert error < max(2 * float(rounded), 1e-6)


def test_products_of_some_rows_with_no_fewer_inputs_than_outputs_are_halved() -> None:
    square = torch.empty(40, 40)
    assert [rows for rows in (64, 65, 256, 257) if is_halved(rows, square)] == [65, 256]
    assert not is_halved(100, torch.empty(40, 38)) and not is_halved(100, torch.empty(40, 81))
