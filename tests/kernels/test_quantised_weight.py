"""Weights of 4- and 8-bit codes: values, concatenation, parts and shards, against a plain reading of the formula."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.kernels.quantised_weight import VALUES, PartedWeight, QuantisedWeight
from graftlm.kernels.weight import PlainWeight

N, K = 48, 64
RANDOM = np.random.default_rng(0)


def codes(bits: int) -> torch.Tensor:
    found = torch.from_numpy(RANDOM.integers(0, 256, (N, K * bits // 8)).astype(np.uint8))
    return found if bits == 4 else found.clamp_max(0x7E)  # 0x7f is e4m3's NaN


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(RANDOM.random(shape).astype(np.float32) * 0.1 + 0.01).to(dtype)


def integers(groups: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(RANDOM.integers(0, 17, (N, groups))).to(dtype)


WEIGHTS: dict[str, QuantisedWeight] = {
    "Q4_0": QuantisedWeight(codes(4), 4, None, 32, 1, scales(N, 2), 8),
    "Q4_1": QuantisedWeight(codes(4), 4, None, 32, 1, scales(N, 2), minimum=-scales(N, 2)),
    "Q8_0": QuantisedWeight(codes(8), 8, None, 32, 1, scales(N, 2), 128),
    "Q6_K": QuantisedWeight(codes(8), 8, None, 16, 1, scales(N, 4, dtype=torch.float32), 32),
    "IQ4_NL": QuantisedWeight(codes(4), 4, "iq4_nl", 32, 1, scales(N, 2)),
    "NVFP4": QuantisedWeight(codes(4), 4, "e2m1", 16, 1, scales(N, 4, dtype=torch.float32)),
    "nf4": QuantisedWeight(codes(4), 4, "nf4", 64, 1, scales(N, 1, dtype=torch.float32)),
    "FP8 channel": QuantisedWeight(codes(8), 8, "e4m3", K, 1, scales(N, 1, dtype=torch.bfloat16)),
    "FP8 block": QuantisedWeight(codes(8), 8, "e4m3", 32, 16, scales(3, 2, dtype=torch.float32)),
    "FP8 short block": QuantisedWeight(codes(8), 8, "e4m3", 32, 32, scales(2, 2, dtype=torch.float32)),
    "W4A16 asymmetric": QuantisedWeight(
        codes(4), 4, None, 32, 1, scales(N, 2, dtype=torch.bfloat16), integers(2, torch.uint8)
    ),
    "act-order": QuantisedWeight(
        codes(4), 4, None, 32, 1, scales(N, 2), integers(2, torch.int16), order=torch.randperm(K).int()
    ),
}


def values(weight: QuantisedWeight) -> torch.Tensor:
    """The values by the formula, one entry at a time."""
    n, k = weight.shape
    expected = np.empty((n, k), np.float32)
    raw, scale = weight.codes.numpy(), weight.scale.float().numpy()
    for o in range(n):
        for i in range(k):
            code = int(raw[o, i]) if weight.bits == 8 else int(raw[o, i // 2]) >> 4 * (i % 2) & 15
            value = np.float32(code)
            if weight.table == "e4m3":
                sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
                size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
                value = np.float32(-size if sign else size)
            elif weight.table is not None:
                value = np.float32(VALUES[weight.table][code])
            group = i // weight.group
            zero = weight.zero[o, group].item() if isinstance(weight.zero, torch.Tensor) else weight.zero or 0
            value = (value - np.float32(zero)) * scale[o // weight.block_n, group]
            if weight.minimum is not None:
                value += weight.minimum[o, group].float().numpy()
            expected[o, i if weight.order is None else int(weight.order[i])] = value
    return torch.from_numpy(expected).to(weight.dtype)


def first(weight: QuantisedWeight, count: int) -> QuantisedWeight:
    found = weight.split([count])[0]
    assert isinstance(found, QuantisedWeight)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_values_follow_the_formula_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    weight = replace(WEIGHTS[name], dtype=dtype)
    assert weight.shape == (N, K)
    assert torch.equal(weight.dense(), values(weight))
    assert torch.equal(weight.dense(slice(5, 33)), values(weight)[5:33])


@pytest.mark.parametrize("name", WEIGHTS)
def test_split_weights_are_concatenated_again(name: str) -> None:
    weight = WEIGHTS[name]
    parts = weight.split([16, 21, 11])
    assert [part.shape for part in parts] == [(16, K), (21, K), (11, K)]
    joined = parts[0].concat(parts[1:])
    assert isinstance(joined, QuantisedWeight)
    assert torch.equal(joined.dense(), weight.dense())
    assert torch.equal(joined.codes, weight.codes)
    assert parts[1].num_bytes < weight.num_bytes


def test_weights_of_one_format_with_other_zero_points_are_one_weight() -> None:
    weight = WEIGHTS["Q4_0"]
    other = replace(weight, zero=7)
    joined = weight.concat([other, replace(weight, zero=integers(2, torch.int16))])
    assert isinstance(joined, QuantisedWeight) and isinstance(joined.zero, torch.Tensor)
    assert torch.equal(joined.dense()[: 2 * N], torch.cat([weight.dense(), other.dense()]))


def test_blocks_of_outputs_that_do_not_meet_get_a_scale_per_output() -> None:
    short = WEIGHTS["FP8 short block"]  # 48 outputs in blocks of 32
    joined = short.concat([short])
    assert isinstance(joined, QuantisedWeight) and joined.block_n == 1
    assert torch.equal(joined.dense(), torch.cat([short.dense(), short.dense()]))
    even = WEIGHTS["FP8 block"].concat([WEIGHTS["FP8 block"]])
    assert isinstance(even, QuantisedWeight) and even.block_n == 16


def test_weights_of_different_formats_are_parts() -> None:
    q, k, v = WEIGHTS["Q4_1"], WEIGHTS["Q6_K"], PlainWeight(torch.randn(8, K).bfloat16())
    parted = q.concat([k, v])
    assert isinstance(parted, PartedWeight) and parted.shape == (2 * N + 8, K)
    whole = torch.cat([q.dense(), k.dense(), v.dense()])
    assert torch.equal(parted.dense(), whole)
    assert torch.equal(parted.dense(slice(40, 100)), whole[40:100])
    assert parted.num_bytes == q.num_bytes + k.num_bytes + v.num_bytes
    again = parted.split([N, N, 8])
    assert [type(part) for part in again] == [QuantisedWeight, QuantisedWeight, PlainWeight]
    uneven = parted.split([30, 74])
    assert all(torch.equal(a.dense(), b) for a, b in zip(uneven, whole.split([30, 74]), strict=True))
    assert torch.equal(parted.shard(0, 1, 2).dense(), whole[52:])
    assert torch.equal(parted.shard(1, 1, 2).dense(), whole[:, 32:])
    flat = parted.concat([q.concat([k])])
    assert isinstance(flat, PartedWeight) and len(flat.parts) == 5


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "act-order"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_shard_is_an_equal_part_of_outputs_or_inputs(name: str, axis: int) -> None:
    weight = WEIGHTS[name]
    whole = weight.dense()
    shards = [weight.shard(axis, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([shard.dense() for shard in shards], axis), whole)
    assert all(shard.codes.data_ptr() != weight.codes.data_ptr() for shard in shards)
    assert sum(shard.codes.nbytes for shard in shards) == weight.codes.nbytes


def test_inputs_of_a_shard_are_whole_groups_in_order() -> None:
    with pytest.raises(ValueError, match="8 inputs of a weight .* no multiple of its groups of 12"):
        QuantisedWeight(codes(8)[:, :24], 8, None, 12, 1, scales(N, 2)).shard(1, 0, 3)
    with pytest.raises(ValueError, match="act-order"):
        WEIGHTS["act-order"].shard(1, 0, 2)
    with pytest.raises(ValueError, match="no multiple of 5 ranks"):
        WEIGHTS["Q4_0"].shard(0, 0, 5)
    assert torch.equal(WEIGHTS["act-order"].shard(0, 1, 2).dense(), WEIGHTS["act-order"].dense()[24:])
    channel = WEIGHTS["FP8 channel"].shard(1, 3, 4)
    assert channel.group == 16 and torch.equal(channel.dense(), WEIGHTS["FP8 channel"].dense()[:, 48:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": codes(4).int()}, "in torch.int32; use 8 bits"),
        ({"table": "e4m3"}, "4 bits of e4m3"),
        ({"bits": 8, "group": 16, "scale": scales(N, 2), "table": "nf4"}, "8 bits of nf4"),
        ({"group": 48}, "no groups of 48 inputs"),
        ({"scale": scales(N, 4)}, r"scale of a weight \(48, 64\) is \(48, 4\), expected \(48, 2\)"),
        ({"minimum": scales(N, 1)}, r"minimum of a weight .* expected \(48, 2\)"),
        ({"order": torch.arange(8)}, r"order of a weight .* expected \(64,\)"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WEIGHTS["Q4_0"], **change)


def test_parts_have_one_dtype_and_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="has no concatenation"):
        WEIGHTS["Q4_0"].concat([replace(WEIGHTS["Q4_1"], dtype=torch.float32)])
