"""Products of few rows against torch's; without a GPU, in Triton's interpreter."""

import pytest
import torch

from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.gpu.linear.batch_invariant_matmul import FixedProduct
from graftlm.kernels.gpu.linear.gemv import gemv
from graftlm.kernels.gpu.linear.skinny_matmul import SkinnyTile, parts_tile, skinny_gate_up, skinny_matmul, skinny_parts
from tests.kernels.gpu.test_elementwise import ACTIVATIONS, DEVICE, DTYPES, close, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [96, 1100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_of_one_row_takes_in_the_gate(activation: Activation, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(1, k, dtype=dtype), random(2 * 40, k, dtype=dtype) / k**0.5, random(80, dtype=dtype)
    product = x.double() @ weight.double().T + bias.double()
    assert close(gemv(x, weight, bias), product, dtype)
    assert close(gemv(x, weight, bias, activation=activation), gate_by_torch(product, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(1, 64, 256), (2, 64, 256), (17, 40, 200), (64, 130, 72)])
def test_a_product_of_few_rows_takes_in_the_gate_and_leaves_its_parts_to_be_summed(
    num_rows: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, k, dtype=dtype), random(2 * n, k, dtype=dtype) / k**0.5
    product = x.double() @ weight.double().T
    bias = random(2 * n, dtype=dtype)
    assert close(skinny_matmul(x, weight), product, dtype)
    assert close(skinny_matmul(x, weight, bias), product + bias.double(), dtype)
    for activation in ACTIVATIONS:
        assert close(skinny_gate_up(x, weight, activation), gate_by_torch(product, activation), dtype)
    for splits in (1, 2, 3):
        parts = skinny_parts(x, weight, SkinnyTile(64, 32, splits, 2))
        assert parts.shape == (splits, num_rows, 2 * n) and parts.dtype is torch.float32
        assert close(parts.sum(0), product, dtype)


@pytest.mark.parametrize(("n", "splits"), [(64, 8), (1000, 8), (4096, 2), (5120, 1), (16384, 1)])
def test_a_product_is_cut_into_as_many_parts_as_can_run_at_once(n: int, splits: int) -> None:
    assert parts_tile(n, 16, 132).splits == parts_tile(n, 17, 132).splits == splits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 70, 130])
def test_a_fixed_product(num_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(2, num_rows, 72, dtype=dtype), random(45, 72, dtype=dtype), random(45, dtype=dtype)
    linear = FixedProduct(DEVICE, dtype)
    out = linear(x, weight, bias)
    assert close(out, x.double() @ weight.double().T + bias.double(), dtype)


@pytest.mark.gpu  # the products of Triton's interpreter do depend on where a row is
def test_a_fixed_product_gives_a_row_the_same_bits_alone_and_among_others() -> None:
    x, weight = random(300, 4096, dtype=torch.bfloat16), random(500, 4096, dtype=torch.bfloat16)
    linear = FixedProduct(DEVICE, torch.bfloat16)
    out = linear(x, weight)
    for first, last in ((0, 1), (7, 20), (100, 299), (299, 300)):
        assert torch.equal(linear(x[first:last], weight), out[first:last])
