"""Each block type of GGUF against a reading of one number at a time, as llama.cpp's C code has it, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.blocks import quantised, values_of
from graftlm.core.model.gguf.reader import BLOCK_TYPES, TensorInfo
from graftlm.kernels.quantised_weight import VALUES

F = np.float32
Block = npt.NDArray[np.uint8]
TYPES = {kind.name: kind for kind in BLOCK_TYPES.values()}


def half(b: Block, at: int) -> Any:
    return F(b[at : at + 2].copy().view(np.float16)[0])


def _nibbles(b: Block, at: int) -> list[int]:
    """Low nibbles of 16 bytes, then high ones."""
    return [int(b[at + j % 16]) >> 4 * (j // 16) & 15 for j in range(32)]


def q4_0(b: Block) -> list[Any]:
    return [half(b, 0) * F(code - 8) for code in _nibbles(b, 2)]


def q4_1(b: Block) -> list[Any]:
    return [half(b, 0) * F(code) + half(b, 2) for code in _nibbles(b, 4)]


def _five(b: Block, at: int) -> list[int]:
    bits = int(b[at : at + 4].copy().view("<u4")[0])
    return [code | (bits >> j & 1) << 4 for j, code in enumerate(_nibbles(b, at + 4))]


def q5_0(b: Block) -> list[Any]:
    return [half(b, 0) * F(code - 16) for code in _five(b, 2)]


def q5_1(b: Block) -> list[Any]:
    return [half(b, 0) * F(code) + half(b, 2) for code in _five(b, 4)]


def q8_0(b: Block) -> list[Any]:
    return [half(b, 0) * F(code) for code in b[2:].view(np.int8)]


def q2_k(b: Block) -> list[Any]:
    found = []
    for i in range(256):
        scale = int(b[i // 16])
        code = int(b[16 + 32 * (i // 128) + i % 32]) >> 2 * (i % 128 // 32) & 3
        found.append(half(b, 80) * F(scale & 15) * F(code) - half(b, 82) * F(scale >> 4))
    return found


def q3_k(b: Block) -> list[Any]:
    packed, found = [int(x) for x in b[96:108]], []
    for i in range(256):
        group = i // 16
        low = packed[group % 8] >> 4 * (group // 8) & 15
        scale = low | (packed[8 + group % 4] >> 2 * (group // 4) & 3) << 4
        code = int(b[32 + 32 * (i // 128) + i % 32]) >> 2 * (i % 128 // 32) & 3
        code -= 0 if int(b[i % 32]) >> i // 32 & 1 else 4
        found.append(half(b, 108) * F(scale - 32) * F(code))
    return found


def _scale_min(b: Block, group: int) -> tuple[int, int]:
    s = [int(x) for x in b[4:16]]
    if group < 4:
        return s[group] & 63, s[group + 4] & 63
    return s[group + 4] & 15 | s[group - 4] >> 6 << 4, s[group + 4] >> 4 | s[group] >> 6 << 4


def _k(b: Block, at: int, fifth: bool) -> list[Any]:
    found = []
    for i in range(256):
        scale, minimum = _scale_min(b, i // 32)
        code = int(b[at + 32 * (i // 64) + i % 32]) >> 4 * (i % 64 // 32) & 15
        code |= (int(b[16 + i % 32]) >> i // 32 & 1) << 4 if fifth else 0
        found.append(half(b, 0) * F(scale) * F(code) - half(b, 2) * F(minimum))
    return found


def q6_k(b: Block) -> list[Any]:
    found = []
    for i in range(256):
        half_block, j = divmod(i, 128)
        low = int(b[64 * half_block + j % 64]) >> 4 * (j // 64) & 15
        high = int(b[128 + 32 * half_block + j % 32]) >> 2 * (j // 32) & 3
        found.append(half(b, 208) * F(b[192:208].view(np.int8)[i // 16]) * F((low | high << 4) - 32))
    return found


def iq4_nl(b: Block) -> list[Any]:
    return [half(b, 0) * F(VALUES["iq4_nl"][code]) for code in _nibbles(b, 2)]


def iq4_xs(b: Block) -> list[Any]:
    found, high = [], int(b[2:4].copy().view("<u2")[0])
    for i in range(256):
        group, j = divmod(i, 32)
        scale = int(b[4 + group // 2]) >> 4 * (group % 2) & 15 | (high >> 2 * group & 3) << 4
        code = int(b[8 + 16 * group + j % 16]) >> 4 * (j // 16) & 15
        found.append(half(b, 0) * F(scale - 32) * F(VALUES["iq4_nl"][code]))
    return found


def mxfp4(b: Block) -> list[Any]:
    scale = F(2.0) ** F(int(b[0]) - 127)
    return [scale * F(VALUES["e2m1"][code]) for code in _nibbles(b, 1)]


READERS: dict[str, Callable[[Block], list[Any]]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q2_K": q2_k, "Q3_K": q3_k,
    "Q4_K": lambda b: _k(b, 16, False), "Q5_K": lambda b: _k(b, 48, True), "Q6_K": q6_k,
    "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs, "MXFP4": mxfp4,
}  # fmt: skip
HALVES = {
    "Q6_K": [208],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
}


def blocks(name: str, rows: int, inputs: int) -> Block:
    """Random blocks [rows, bytes of a row] with finite scales."""
    random, kind = np.random.default_rng(1), TYPES[name]
    found = random.integers(0, 256, (rows, inputs // kind.size, kind.num_bytes)).astype(np.uint8)
    if name == "MXFP4":
        found[..., 0] = random.integers(100, 150, found.shape[:2])
    else:
        for at in HALVES.get(name, [0]):
            scales = random.standard_normal((*found.shape[:2], 1)).astype(np.float16)
            found[..., at : at + 2] = scales.view(np.uint8)
    return found.reshape(rows, -1)


@pytest.mark.parametrize("name", READERS)
def test_values_of_a_type_are_those_of_one_number_at_a_time(name: str) -> None:
    raw = blocks(name, 3, 512)
    each = raw.reshape(-1, TYPES[name].num_bytes)
    expected = torch.from_numpy(np.array([READERS[name](block) for block in each], F).reshape(3, 512))
    weight = quantised(raw, TYPES[name], torch.float32)
    assert weight.shape == (3, 512) and torch.equal(weight.dense(), expected)
    rounded = quantised(raw, TYPES[name], torch.bfloat16)
    assert torch.equal(rounded.dense(), expected.bfloat16())
    assert rounded.bits == (8 if name in ("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K") else 4)


@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_scales_of_a_k_type_are_whole_multiples_of_its_factors(name: str) -> None:
    weight = quantised(blocks(name, 3, 512), TYPES[name], torch.bfloat16)
    assert weight.factors is not None and (weight.factors[1] is None) == (weight.minimum is None)
    for numbers, factor in zip((weight.scale, weight.minimum), weight.factors, strict=True):
        if numbers is not None and factor is not None:
            each = factor.float().repeat_interleave(256 // weight.group, 1)
            whole = (numbers / each).round()
            assert torch.equal(whole * each, numbers) and whole.abs().max() < 128


def test_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for number, kind in BLOCK_TYPES.items():
        package = gguf.GGMLQuantizationType(number)
        assert (package.name, gguf.GGML_QUANT_SIZES[package]) == (kind.name, (kind.size, kind.num_bytes))
        if kind.name in READERS:
            raw = blocks(kind.name, 2, 512)
            found = quantised(raw, kind, torch.float32).dense()
            assert torch.equal(found, torch.from_numpy(gguf.dequantize(raw, package)))


def test_a_rare_type_asks_for_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(66))
    info = TensorInfo("blk.0.ffn_up.weight", (1, 256), TYPES["IQ2_XXS"], path, 0, 66)
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(ModelError, match=r"'blk.0.ffn_up.weight' in .* stored as IQ2_XXS.* 'graftlm\[gguf\]'"):
        values_of(info, torch.float32)
