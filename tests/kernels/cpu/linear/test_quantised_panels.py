"""Matmuls with quantised panels against float64 of the same codes and of the rows that the loop multiplies."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from graftlm.kernels.cpu.compiled import object_code
from graftlm.kernels.cpu.linear import panels as plain_panels
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels, arithmetic_of, pack, problem, unpack
from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear
from graftlm.kernels.cpu.panel_kind import Arithmetic, Numbers
from graftlm.kernels.quantised_weight import QuantisedWeight

NUM_OUT, NUM_IN = 200, 256
TOLERANCE = 4e-7
"""Relative to the largest result: sums in float32 of 256 products."""

FORMATS: dict[str, dict[str, Any]] = {
    "Q4_0": {"bits": 4, "group": 32, "zero": 8},
    "Q4_1": {"bits": 4, "group": 32, "minimum": True},
    "Q4_K": {"bits": 4, "group": 32, "minimum": True, "factors": True, "num_in": 512},
    "AWQ": {"bits": 4, "group": 128, "zero": "tensor"},
    "IQ4_NL": {"bits": 4, "group": 32, "table": "iq4_nl"},
    "MXFP4": {"bits": 4, "group": 32, "table": "e2m1", "numbers": torch.float32},
    "nf4": {"bits": 4, "group": 64, "table": "nf4", "numbers": torch.float32},
    "Q8_0": {"bits": 8, "group": 32, "zero": 128},
    "Q6_K": {"bits": 8, "group": 16, "zero": 32, "factors": True, "codes": 64, "num_in": 512},
    "Q5_K": {"bits": 8, "group": 32, "minimum": True, "factors": True, "codes": 32},
    "Q5_0": {"bits": 8, "group": 32, "zero": 16, "codes": 32},
    "Q5_1": {"bits": 8, "group": 32, "minimum": True, "codes": 32},
    "int8 an output": {"bits": 8, "group": NUM_IN, "zero": "tensor"},
    "all of 256 codes": {"bits": 8, "group": 32, "zero": None},
    "fp8 in blocks": {"bits": 8, "group": 128, "table": "e4m3", "block_n": 128, "numbers": torch.bfloat16},
}


def weight_in(name: str, dtype: torch.dtype) -> QuantisedWeight:
    kind = {"zero": None, "minimum": False, "table": None, "block_n": 1, "numbers": torch.float16, **FORMATS[name]}
    torch.manual_seed(0)
    num_in = kind.get("num_in", NUM_IN)
    bits, groups = kind["bits"], num_in // kind["group"]
    most = kind.get("codes", 256)
    codes = torch.randint(0, most, (NUM_OUT, num_in * bits // 8), dtype=torch.uint8)
    if kind["table"] == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    zero = kind["zero"]
    if zero == "tensor":
        zero = torch.randint(0, 16 if bits == 4 else 256, (NUM_OUT, groups), dtype=torch.uint8)
    scale = torch.rand(-(-NUM_OUT // kind["block_n"]), groups).to(kind["numbers"])
    minimum = torch.randn(NUM_OUT, groups).to(kind["numbers"]) if kind["minimum"] else None
    factors = None
    if kind.get("factors"):
        first, second = ((torch.rand(NUM_OUT, num_in // 256) / 64).half() for _ in range(2))
        scale, minimum = (
            torch.randint(-128, 128, (NUM_OUT, groups)) * factor.float().repeat_interleave(256 // kind["group"], 1)
            for factor in (first, second)
        )
        factors = (first, second) if kind["minimum"] else (first, None)
        minimum = minimum if kind["minimum"] else None
    return QuantisedWeight(
        codes, bits, kind["table"], kind["group"], kind["block_n"], scale, zero=zero, minimum=minimum, dtype=dtype,
        factors=factors,
    )  # fmt: skip


def multiplied_rows(panels: QuantisedPanels, x: torch.Tensor) -> torch.Tensor:
    """Return the rows that the loop multiplies, in float64."""
    if panels.arithmetic is not Arithmetic.INT8:
        return x.double()
    groups = x.float().view(len(x), -1, 32)
    top = groups.abs().amax(-1, keepdim=True)
    whole = (groups.double() * (torch.tensor(127.0) / top)).round()
    return (whole * (top * torch.tensor(1 / 127)).double()).view(x.shape)


def assert_multiplies(panels: QuantisedPanels, weight: QuantisedWeight) -> None:
    exact = replace(weight, dtype=torch.float32).dense().double()
    linear = SkinnyLinear([panels], None, torch.float32)
    for num_rows in (1, 2, 3, 4, 7, 33):
        x = torch.randn(num_rows, weight.shape[1]).bfloat16().float()
        expected = multiplied_rows(panels, x) @ exact.T
        found = linear(x).double()
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("activations", ["exact", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_matmul_with_codes_is_as_exact_as_one_with_values(name: str, dtype: torch.dtype, activations: Any) -> None:
    weight = weight_in(name, dtype)
    assert problem(weight) is None
    assert_multiplies(pack(weight, None, arithmetic_of(weight, activations)), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_float32_arithmetic_multiplies_every_format(name: str) -> None:
    weight = weight_in(name, torch.bfloat16)
    assert_multiplies(pack(weight, None, Arithmetic.FLOATS), weight)


@pytest.mark.parametrize("name", FORMATS)
def test_gathered_outputs_are_those_of_the_dense_weight(name: str) -> None:
    weight = weight_in(name, torch.float32)
    ids = torch.tensor([199, 0, 63, 64, 0])
    found = pack(weight, None, Arithmetic.FLOATS).gather(ids)
    torch.testing.assert_close(found, weight.dense()[ids], rtol=1e-6, atol=1e-5)


def test_parts_of_different_kinds_and_plain_ones_are_one_matmul() -> None:
    weights = [weight_in(name, torch.bfloat16) for name in ("Q5_K", "AWQ", "Q8_0")]
    bias = torch.randn(NUM_OUT).bfloat16()
    parts: list[Any] = [pack(weight, bias, arithmetic_of(weight)) for weight in weights]
    plain = torch.randn(70, NUM_IN).bfloat16()
    parts.append(plain_panels.pack(plain, None))
    x = torch.randn(3, NUM_IN).bfloat16()
    exact = [replace(weight, dtype=torch.float32).dense() for weight in weights]
    expected = [torch.nn.functional.linear(x.float(), values, bias.float()) for values in exact]
    expected.append(torch.nn.functional.linear(x.float(), plain.float()))
    found = SkinnyLinear(parts, None, torch.bfloat16)(x).float()
    for one, of_one in zip(found.split([NUM_OUT, NUM_OUT, NUM_OUT, 70], 1), expected, strict=True):
        assert (one - of_one).norm() <= 4e-3 * of_one.norm()  # rounded to bfloat16


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_scales_take_a_byte_if_they_are_multiples_of_the_factors(name: str) -> None:
    weight = weight_in(name, torch.bfloat16)
    panels = pack(weight, None, Arithmetic.FLOATS)
    assert panels.kind.numbers is Numbers.INT8
    assert torch.equal(unpack(panels).dense(), weight.dense())
    again = pack(unpack(panels), None, Arithmetic.FLOATS)
    assert again.kind == panels.kind and torch.equal(again.packed, panels.packed)
    other = replace(weight, scale=weight.scale * 1.001)
    assert pack(other, None, Arithmetic.FLOATS).kind.numbers is Numbers.FLOAT32
    assert weight.outputs(0, 64).factors is None


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "Q5_K", "Q6_K"])
def test_codes_below_64_take_six_bits(name: str) -> None:
    weight = weight_in(name, torch.bfloat16)
    panels = pack(weight, None, Arithmetic.FLOATS)
    assert panels.kind.bits == 6
    assert 8 * panels.kind.codes_bytes == 6 * panels.kind.block * 64
    back = unpack(panels)
    assert back.bits == 8 and torch.equal(back.codes, weight.codes)
    assert torch.equal(back.dense(), weight.dense())
    codes = weight.codes.clone()
    codes[7, 3] = 64
    assert pack(replace(weight, codes=codes), None, Arithmetic.FLOATS).kind.bits == 8


def test_a_row_of_zeros_in_int8_is_zero() -> None:
    weight = weight_in("Q4_0", torch.float32)
    panels = pack(weight, None, arithmetic_of(weight, "int8"))
    assert SkinnyLinear([panels], None, torch.float32)(torch.zeros(2, NUM_IN)).abs().max() == 0


def test_groups_that_no_loop_reads_are_named() -> None:
    codes, scale = torch.zeros(64, 48, dtype=torch.uint8), torch.ones(64, 2)
    weight = QuantisedWeight(codes, 8, None, 24, 1, scale)
    assert problem(weight) == "groups of 24 inputs, which are no multiple of 16"
    weight = QuantisedWeight(codes, 8, None, 16, 1, torch.ones(64, 3), minimum=torch.ones(64, 3))
    assert problem(weight) == "minima of 16 inputs, which are no multiple of 32"


def test_int8_activations_leave_formats_without_whole_numbers_exact() -> None:
    assert arithmetic_of(weight_in("nf4", torch.float32), "int8") is Arithmetic.FLOATS
    assert arithmetic_of(weight_in("Q6_K", torch.float32), "int8") is Arithmetic.FLOATS


AVX2 = """
import torch
from tests.kernels.cpu.linear.test_quantised_panels import *
for name, activations, arithmetic in (("Q4_1", "int8", Arithmetic.INT8), ("MXFP4", "int8", Arithmetic.FLOATS),
                                      ("Q4_0", "exact", Arithmetic.FLOATS), ("Q8_0", "exact", Arithmetic.FLOATS),
                                      ("Q6_K", "exact", Arithmetic.FLOATS), ("Q5_0", "int8", Arithmetic.FLOATS)):
    weight = weight_in(name, torch.bfloat16)
    assert arithmetic_of(weight, activations) is arithmetic
    assert_multiplies(pack(weight, None, arithmetic), weight)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="compiles instructions of x86")
@pytest.mark.skipif("avx2" not in object_code.processor()[1], reason="this processor has no AVX2")
def test_processors_with_avx2_alone_multiply_too() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+f16c,+fma,+bmi,+bmi2,+lzcnt,+popcnt",
    }
    subprocess.run([sys.executable, "-c", AVX2], check=True, env=environment)
