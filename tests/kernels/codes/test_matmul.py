"""Matmuls with quantised weights. Without a GPU the kernel is compiled only."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.codes.fp8_rows import exact_rows
from graftlm.kernels.codes.tiled_weight import TiledParts, TiledWeight, tiled
from graftlm.kernels.linear_kernels import FEW_ROWS, Codes, Fp8, Role
from graftlm.kernels.quantised_weight import PartedWeight
from graftlm.kernels.weight import Weight
from tests.kernels.codes.test_tiled_weight import FORMATS, quantised, tiles_of
from tests.kernels.gluon import compile_for_hopper, error, random

TOLERANCE = 5e-3
"""One rounding of the result."""


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, role: Role = "qkv") -> torch.Tensor:
    """The product by the kernel of the number of rows, parts summed."""
    assert isinstance(weight, TiledWeight | TiledParts)
    kernel = Codes(type(weight), "codes.matmul" if len(x) <= FEW_ROWS else "codes.wide_matmul")
    run = kernel.make(weight, role, bias)
    assert run is not None
    found = run(x)
    return found if found.dim() == 2 else found.sum(0) + (0 if bias is None or role == "add" else bias)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_every_row_and_output_is_its_sum(name: str) -> None:
    n, k = 1000, 2304
    options = FORMATS[name] | ({"group": k} if FORMATS[name].get("group") == 256 else {})
    weight, bias = quantised(n, k, **options), random(n)
    tiles = tiles_of(weight)
    for num_rows in (1, 9, 17, 100):
        x = random(num_rows, k)
        expected = x.double() @ weight.dense().double().t()
        assert error(product(x, tiles, bias), expected + bias.double()) < TOLERANCE
        assert error(product(x, tiles, role="add"), expected) < TOLERANCE  # values of `dense` are rounded


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4 in 32s", "int4 with minima", "e4m3 an output"])
def test_gates_are_inside(name: str) -> None:
    weight = quantised(1024, 768, **FORMATS[name] | ({"group": 768} if "an output" in name else {}))
    for num_rows in (1, 20, 64, 100):
        x = random(num_rows, 768)
        gate, up = (x.double() @ weight.dense().double().t()).bfloat16().double().chunk(2, -1)
        expected = (gate * torch.sigmoid(gate)).bfloat16().double() * up
        assert error(product(x, tiles_of(weight, gates=True), role="gate_up"), expected) < 2 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [False, True])
def test_rows_and_weights_in_e4m3(gates: bool) -> None:
    weight, bias = quantised(1024, 768, bits=8, table="e4m3", group=768), random(1024)
    tiles, x = tiled(weight, gates=gates, fp8=True), exact_rows(random(100, 768))
    assert isinstance(tiles, TiledWeight)
    expected = x.double() @ weight.dense().double().t()
    if gates:
        gate, up = expected.bfloat16().double().chunk(2, -1)
        expected = (gate * torch.sigmoid(gate)).bfloat16().double() * up
    role: Role = "gate_up" if gates else "qkv"
    many = Fp8().make(tiles, role, None if gates else bias)
    assert many is not None
    for found in (many(x), product(x, tiles, None if gates else bias, role)):
        assert error(found, expected if gates else expected + bias.double()) < 2 * TOLERANCE


@pytest.mark.gpu
def test_weights_of_several_formats_are_one_product() -> None:
    weight = PartedWeight(
        tuple(quantised(n, 512, **FORMATS[f]) for n, f in ((320, "int4 in 32s"), (72, "int8 in 16s")))
    )
    both, bias = tiled(weight), random(392)
    for num_rows in (1, 40, 130):
        x = random(num_rows, 512)
        assert both is not None
        expected = x.double() @ weight.dense().double().t()
        assert error(product(x, both, bias), expected + bias.double()) < TOLERANCE
        assert error(product(x, both, role="add"), expected) < TOLERANCE


_COMPILE = """
from graftlm.kernels.codes.code_tiles import lines_layout
rows, box, bits, lines, groups, kind, table = {case}
boxes = lambda of, height: f"tensordesc<{{of}}[{{height}}, 32],{{lines_layout()!r}}>"
teams, depth = kernel.LAYOUTS[rows].teams, max(kernel.LAYOUTS[rows].depth * 4 // bits, 1)
codes = boxes("i32", depth * bits // 4 * 32)
signature = dict(codes=codes, scales="*fp32", bias="*bf16", out="*bf16",
    x_tiles=f"tensordesc<bf16[{{depth * 128 // box}}, {{rows}}, {{box}}],{{kernel.boxes_layout(box)!r}}>",
    scale_tiles=boxes("fp32", depth * lines) if lines else codes)
signature |= dict.fromkeys(("num_rows", "n", "out_row", "num_items", "num_blocks", "steps", "tiles"), "i32")
given = dict(SHAPE=(rows, box, bits, depth * lines, teams, depth, 1), SCALE_LINES=lines, STAGES=teams,
    FORMAT=(groups, kind, table), OUTPUT=(False, False, ""), REGISTERS=kernel.LAYOUTS[rows].registers, PDL=True)
"""


@pytest.mark.parametrize("case", [(8, 64, 4, 2, 1, "scale", ""), (64, 64, 8, 0, 0, "scale", "e4m3")])
def test_it_compiles_for_hopper(case: tuple[object, ...]) -> None:
    compile_for_hopper("codes.matmul", "_codes", _COMPILE.format(case=case), "bf16", 168)
