"""Matmuls with quantised weights. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from graftlm.kernels.codes.tiled_weight import tiled
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.quantised_weight import PartedWeight
from tests.kernels.codes.test_tiled_weight import FORMATS, quantised, tiles_of
from tests.kernels.gluon import compile_for_hopper, error, random

TOLERANCE = 5e-3
"""One rounding of the result."""


def kernel() -> ModuleType:
    found = gluon_kernel("codes.matmul")
    assert found is not None
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_row_and_output_is_its_sum(name: str) -> None:
    n, k = 1000, 2304
    options = FORMATS[name] | ({"group": k} if FORMATS[name].get("group") == 256 else {})
    weight, bias = quantised(n, k, **options), random(n)
    tiles = tiles_of(weight)
    for num_rows in (1, 17, 100):
        x = random(num_rows, k)
        product = x.double() @ weight.dense().double().t()
        assert error(kernel().codes_matmul(x, tiles, bias), product + bias.double()) < TOLERANCE
        assert error(kernel().codes_parts(x, tiles).sum(0), product) < TOLERANCE  # values of `dense` are rounded


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4 in 32s", "int4 with minima", "e4m3 an output"])
def test_gates_are_inside(name: str) -> None:
    weight = quantised(1024, 768, **FORMATS[name] | ({"group": 768} if "an output" in name else {}))
    for num_rows in (1, 20, 64):
        x = random(num_rows, 768)
        gate, up = (x.double() @ weight.dense().double().t()).bfloat16().double().chunk(2, -1)
        expected = (gate * torch.sigmoid(gate)).bfloat16().double() * up
        found = kernel().codes_matmul(x, tiles_of(weight, gates=True), activation="silu")
        assert error(found, expected) < 2 * TOLERANCE


@pytest.mark.gpu
def test_weights_of_several_formats_are_one_product() -> None:
    weight = PartedWeight(
        tuple(quantised(n, 512, **FORMATS[f]) for n, f in ((320, "int4 in 32s"), (72, "int8 in 16s")))
    )
    both, bias = tiled(weight), random(392)
    for num_rows in (1, 40, 130):
        x = random(num_rows, 512)
        product = x.double() @ weight.dense().double().t()
        assert error(kernel().codes_matmul(x, both, bias), product + bias.double()) < TOLERANCE
        assert error(kernel().codes_parts(x, both).sum(0), product) < TOLERANCE


_COMPILE = """
from graftlm.kernels.codes.code_tiles import lines_layout
rows, box, bits, lines, groups, kind, table = {case}
boxes = lambda of, height: f"tensordesc<{{of}}[{{height}}, 32],{{lines_layout()!r}}>"
signature = dict(x_tiles=tile(rows, box), codes=boxes("i32", 32), scales="*fp32", bias="*bf16", out="*bf16",
    scale_tiles=boxes("fp32", lines) if lines else boxes("i32", 32))
signature |= dict.fromkeys(("num_rows", "n", "out_row", "num_items", "num_blocks", "steps", "tiles"), "i32")
teams = kernel.LAYOUTS[rows].teams
given = dict(SHAPE=(rows, box, bits, lines, teams), SCALE_LINES=lines, STAGES=teams, GROUPS=groups, KIND=kind,
    TABLE=table, BIAS=False, GATE=False, ACTIVATION="", REGISTERS=kernel.LAYOUTS[rows].registers, PDL=True)
"""


@pytest.mark.parametrize("case", [(16, 32, 4, 16, 4, "minimum", ""), (64, 64, 8, 0, 0, "scale", "e4m3")])
def test_it_compiles_for_hopper(case: tuple[object, ...]) -> None:
    compile_for_hopper("codes.matmul", "_codes", _COMPILE.format(case=case), "bf16", {16: 96, 64: 168}[case[0]])  # type: ignore[index]
