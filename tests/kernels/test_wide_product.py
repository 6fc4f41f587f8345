"""Products in halves give what one product gives."""

import pytest
import torch
from torch.nn.functional import linear

from graftlm.kernels.wide_product import is_deep, is_wide, product_halves, wide_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("num_rows", [65, 224, 225, 256, 257])
def test_halves_of_the_outputs_are_the_whole(num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 48, device=DEVICE), torch.randn(130, 48, device=DEVICE)
    torch.testing.assert_close(wide_product(x, weight), linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_of_the_inputs_add_up(dtype: torch.dtype) -> None:
    x, weight = (torch.randn(n, 96, device=DEVICE).to(dtype) for n in (70, 40))
    exact = x.double() @ weight.double().T
    parts = product_halves(x, weight)
    assert parts.shape == (2, 70, 40) and parts.dtype == dtype and parts[0].is_contiguous()
    error, rounded = ((y.double() - exact).norm() / exact.norm() for y in (parts.float().sum(0), linear(x, weight)))
    assert error < max(2 * float(rounded), 1e-6)


def test_what_is_cut() -> None:
    assert [rows for rows in (64, 65, 256, 257) if is_wide(rows)] == [65, 256]
    assert is_deep(torch.empty(40, 80)) and not is_deep(torch.empty(40, 79)) and not is_deep(torch.empty(40, 81))
