"""Quantised weights in tiles: their values are those of the weight, whatever its format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.kernels.codes.tiled_weight import TiledWeight, problem, tiled
from graftlm.kernels.quantised_weight import PartedWeight, QuantisedWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def quantised(n: int, k: int, bits: Any = 4, table: Any = None, group: int = 32, **fields: Any) -> QuantisedWeight:
    """A random weight; fields: zero "middle", "each" or an integer, minimum, order, block_n, of the file's dtype."""
    codes = torch.randint(256, (n, k * bits // 8), dtype=torch.uint8, device=DEVICE)
    if table == "e4m3":
        codes = (codes & 0x80) | (codes & 0x7F).clamp(max=0x7E)
    groups, block_n = k // group, fields.get("block_n", 1)
    scale = (0.5 + torch.rand(-(-n // block_n), groups, device=DEVICE)).to(fields.get("dtype", torch.float16)) / 16
    if fields.get("powers"):
        scale = scale.float().log2().round().exp2()
    zero = fields.get("zero")
    if zero == "each":
        zero = torch.randint(2**bits, (n, groups), dtype=torch.uint8, device=DEVICE)
    minimum = torch.randn(n, groups, device=DEVICE).half() if fields.get("minimum") else None
    order = torch.randperm(k, device=DEVICE).int() if fields.get("order") else None
    return QuantisedWeight(codes, bits, table, group, block_n, scale, zero, minimum, order)


FORMATS: dict[str, dict[str, Any]] = {
    "int4 in 32s": {"zero": 8},
    "int4 in 128s": {"zero": 8, "group": 128, "dtype": torch.bfloat16},
    "int4 an output": {"zero": 8, "group": 256},
    "int4 with zero points": {"zero": "each", "group": 128},
    "int4 with minima": {"minimum": True, "zero": 0},
    "int4 in another order": {"zero": 8, "group": 64, "order": True},
    "int8 in 16s": {"bits": 8, "zero": 128, "group": 16},
    "int8 an output": {"bits": 8, "zero": 128, "group": 256},
    "int8 with minima": {"bits": 8, "minimum": True, "group": 32},
    "e4m3 an output": {"bits": 8, "table": "e4m3", "group": 256},
    "e4m3 in blocks": {"bits": 8, "table": "e4m3", "group": 128, "block_n": 128},
    "e4m3 in 64s": {"bits": 8, "table": "e4m3", "group": 64},
    "e2m1 in powers": {"table": "e2m1", "powers": True},
    "e2m1 in 16s": {"table": "e2m1", "group": 16, "dtype": torch.float32},
}


def tiles_of(weight: QuantisedWeight, *, gates: bool = False) -> TiledWeight:
    found = tiled(weight, gates=gates)
    assert isinstance(found, TiledWeight)
    return found


def test_bytes_by_output_are_the_codes() -> None:
    weight = quantised(160, 320, bits=8, table="e4m3", group=320)
    assert torch.equal(tiles_of(weight).bytes_by_output().view(torch.uint8), weight.codes)
    assert torch.equal(tiles_of(weight, gates=True).bytes_by_output().view(torch.uint8), weight.codes)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if all are equal up to one rounding of sums of two float32 numbers, which half precision rounds again."""
    return torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_weight(name: str) -> None:
    weight = quantised(72, 256, **FORMATS[name])
    found = tiles_of(weight)
    assert close(found.dense(), weight.dense())
    assert close(found.dense(slice(66, 71)), weight.dense(slice(66, 71)))


def test_gates_and_ups_alternate_and_come_back() -> None:
    weight = quantised(80, 320, zero=8, group=64)
    assert close(tiles_of(weight, gates=True).dense(), weight.dense())


def test_weights_part_again_at_tiles_and_within() -> None:
    weight = quantised(200, 256, zero=8)
    tiles = tiles_of(weight)
    for sizes in ([128, 64, 8], [100, 100]):
        for part, expected in zip(tiles.split(sizes), weight.dense().split(sizes), strict=True):
            assert close(part.dense(), expected)
    both = tiled(PartedWeight((weight, quantised(64, 256, bits=8, zero=128, group=16))))
    assert both is not None and both.shape == (264, 256)
    assert close(both.dense(slice(0, 200)), weight.dense())


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (quantised(64, 256, table="nf4"), "nf4"),
        (quantised(64, 192), "192 inputs"),
        (quantised(64, 288, group=96), "288 inputs"),
        (quantised(64, 384, group=96, zero=8), "groups of 96"),
    ],
)
def test_formats_without_a_kernel_are_told_apart(weight: QuantisedWeight, words: str) -> None:
    assert words in (problem(weight) or "")
    assert tiled(weight) is None
