"""Products of any number of rows in one order of sums. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.linear_kernels import OneOrder, Role
from graftlm.kernels.weight import PlainWeight
from tests.kernels.gluon import compile_for_hopper, error, random

HALF_DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""One rounding of the result."""


def kernel() -> ModuleType:
    found = gluon_kernel("hopper.tiled_matmul")
    assert found is not None
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("num_rows", [1, 65, 128, 129, 300, 1500])
@pytest.mark.parametrize(("n", "k"), [(1000, 512), (6144, 1024), (520, 1152)])
def test_every_row_and_output_is_its_sum_by_every_tile(n: int, k: int, num_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(num_rows, k, dtype=dtype), random(n, k, dtype=dtype) / k**0.5, random(n, dtype=dtype)
    expected = x.double() @ weight.double().t()
    for tile in (None, kernel().SQUARE, kernel().WIDE, kernel().NARROW):
        room = torch.full((1, num_rows + 1, n), 7.0, dtype=dtype, device="cuda")
        kernel().launch(x, weight, room[:, :num_rows], bias, tile=tile)
        assert error(room[0, :num_rows], expected + bias.double()) < TOLERANCE[dtype]
        assert bool((room[0, num_rows:] == 7).all())
        parts = torch.full((4, num_rows, n), float("nan"), device="cuda")
        kernel().launch(x, weight, parts, num_parts=4, tile=tile)
        assert error(parts.sum(0), expected) < 2e-5
    whole = torch.full((1, num_rows, n), float("nan"), device="cuda")
    kernel().launch(x, weight, whole, num_parts=4)
    assert torch.equal(whole[0], parts[0] + parts[1] + parts[2] + parts[3])


@pytest.mark.gpu
@pytest.mark.parametrize("role", ["qkv", "gate_up", "add", "head"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 14336), (1008, 576)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(n: int, k: int, role: Role) -> None:
    x, weight = random(1100, k), random(n, k) / k**0.5
    run = OneOrder().make(PlainWeight(weight), role)
    assert run is not None

    def product(first: int, last: int) -> torch.Tensor:
        found = run(x[first:last])
        if role != "add":
            return found
        total = found[0].clone()
        for part in found[1:]:
            total += part
        return total

    whole = product(0, 1100)
    for num_rows in (1, *OneOrder.probes, 700):
        for first in (0, 1100 - num_rows):
            assert torch.equal(product(first, first + num_rows), whole[first : first + num_rows]), num_rows


@pytest.mark.parametrize(
    ("tile", "parts", "out", "bias"),
    [((256, 1, 2), 1, "bf16", False), ((128, 1, 2), 4, "fp32", False), ((64, 2, 1), 1, "bf16", True)],
)
def test_it_compiles_for_hopper_and_fits_its_shared_memory(
    tile: tuple[int, int, int], parts: int, out: str, bias: bool
) -> None:
    arguments = f"""
cut = kernel.Tile(*{tile})
signature = dict(x=tile(cut.rows, 64), weight=tile(64, 64), bias="*bf16", out="*{out}")
signature |= dict.fromkeys(["num_rows", "n", "across", "down", "num_items", "steps"], "i32")
given = dict(ROWS=cut.rows, X_BOXES=cut.x_boxes, W_BOXES=cut.w_boxes, K=64, STAGES=cut.stages, BAND=kernel.BAND,
    PARTS={parts}, BIAS={bias}, REGISTERS=240, PDL=True)
"""
    compile_for_hopper("hopper.tiled_matmul", "_tiled", arguments, "bf16", registers=168)
