"""Matmuls of many rows with quantised weights. Without a GPU the kernels are compiled only."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from graftlm.kernels.codes.fp8_rows import exact_rows, fp8_rows
from graftlm.kernels.hopper.support import gluon_kernel
from tests.kernels.codes.test_tiled_weight import FORMATS, quantised, tiles_of
from tests.kernels.gluon import compile_for_hopper, error, random

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 6e-3
"""One rounding of the weights, one of the result."""


def kernel() -> ModuleType:
    found = gluon_kernel("codes.wide_matmul")
    assert found is not None
    return found


def _in_tiles(k: int) -> torch.Tensor:
    """The input at each position of rows in tiles."""
    return torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]) + torch.arange(0, k, 16)[:, None]


@pytest.mark.parametrize("in_tiles", [False, True])
def test_rows_are_rounded_to_e4m3(in_tiles: bool) -> None:
    x = exact_rows(torch.randn(4, 192, device=DEVICE).bfloat16())  # Triton's interpreter rounds wrongly
    x[1], x[2] = 0, x[2] * 2.0**-80
    rows = fp8_rows(x, in_tiles=in_tiles)
    expected = x[:, _in_tiles(192).flatten().to(DEVICE)] if in_tiles else x
    assert torch.equal(rows.codes.float() * rows.scale[:, None], expected.float())
    assert rows.codes.float().abs().amax(1).tolist() == [448, 0, 448, 448]


@pytest.mark.gpu
def test_other_rows_lose_three_hundredths() -> None:
    x = random(300, 4096)
    rows = fp8_rows(x, in_tiles=False)
    assert error(rows.codes.double() * rows.scale[:, None], x.double()) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_row_and_output_is_its_sum(name: str) -> None:
    n, k = 1000, 2304
    options = FORMATS[name] | ({"group": k} if FORMATS[name].get("group") == 256 else {})
    weight, bias = quantised(n, k, **options), random(n)
    tiles = tiles_of(weight)
    for num_rows in (65, 128, 300):
        x = random(num_rows, k)
        ordered = x if tiles.order is None else x[:, tiles.order]
        product = x.double() @ weight.dense().double().t()
        out = torch.full((2, num_rows, n), float("nan"), device="cuda")
        kernel().launch(ordered, tiles, out)
        assert error(out.sum(0), product) < TOLERANCE
        whole = torch.full((1, num_rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
        kernel().launch(ordered, tiles, whole, bias)
        assert error(whole[0], product + bias.double()) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["e4m3 an output", "e4m3 in blocks"])
def test_rows_in_e4m3_are_multiplied_as_they_are(name: str) -> None:
    n, k = 1000, 2304
    weight = quantised(n, k, **FORMATS[name] | ({"group": k} if "an output" in name else {}))
    for num_rows in (65, 300):
        rows = fp8_rows(random(num_rows, k), in_tiles=True)
        values = torch.empty(num_rows, k, dtype=torch.float64, device="cuda")
        values[:, _in_tiles(k).flatten().cuda()] = rows.codes.double() * rows.scale.double()[:, None]
        out = torch.full((2, num_rows, n), float("nan"), device="cuda")
        kernel().launch(rows, tiles_of(weight), out)
        assert error(out.sum(0), values @ weight.dense().double().t()) < TOLERANCE


_COMPILE = """
from triton.experimental.gluon import language as gl
from graftlm.kernels.codes.code_tiles import lines_layout
rows, box, bits, lines, groups, kind, table, fp8 = {case}
boxes = lambda of, height: f"tensordesc<{{of}}[{{height}}, 32],{{lines_layout()!r}}>"
in_rows = gl.NVMMASharedLayout.get_default_for([rows, box], gl.float8e4nv)
in_fp8 = f"tensordesc<fp8e4nv[{{rows}}, {{box}}],{{in_rows!r}}>"
signature = dict(x_tiles=in_fp8 if fp8 else tile(rows, box), codes=boxes("i32", 32), scales="*fp32", bias="*bf16",
    row_scales="*fp32", out="*bf16", scale_tiles=boxes("fp32", lines) if lines else boxes("i32", 32))
signature |= dict.fromkeys(("num_rows", "n", "out_row", "across", "down", "num_items", "steps", "tiles"), "i32")
given = dict(SHAPE=(rows, box, bits, lines, 1 if fp8 else 2), SCALE_LINES=lines, STAGES=2, FORMAT=(groups, kind, table),
    OUTPUT=(False, True, "silu"), BAND=8, REGISTERS=240, PDL=True)
"""


@pytest.mark.parametrize("case", [(128, 32, 4, 16, 4, "minimum", "", False), (128, 64, 8, 0, 0, "scale", "e4m3", True)])
def test_it_compiles_for_hopper(case: tuple[object, ...]) -> None:
    compile_for_hopper("codes.wide_matmul", "_wide", _COMPILE.format(case=case), "bf16", 168)
