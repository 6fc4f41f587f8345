"""Mixtures of experts with quantised weights. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.kernels.codes.expert_codes import ExpertCodes
from graftlm.kernels.codes.tiled_weight import coded_problem
from graftlm.kernels.expert_dispatch import plan_experts
from graftlm.kernels.gpu.mixture.expert_plan import ExpertWeights
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate
from tests.kernels.codes.test_tiled_weight import FORMATS, quantised
from tests.kernels.gluon import compile_for_hopper, error, random

EXPERTS, HIDDEN, INNER = 8, 704, 320


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "interleaved"), [("e2m1 in powers", True), ("e4m3 in 64s", False)])
def test_every_token_has_the_sum_of_its_experts(name: str, interleaved: bool) -> None:
    options: dict[str, Any] = FORMATS[name]
    gate_up = ExpertCodes(quantised(EXPERTS * 2 * INNER, HIDDEN, **options), EXPERTS)
    down = ExpertCodes(quantised(EXPERTS * HIDDEN, INNER, **options), EXPERTS)
    gate = Gate("silu", 1.702, 7.0, 1.0, interleaved=True) if interleaved else Gate()
    biases = (random(EXPERTS, 2 * INNER), random(EXPERTS, HIDDEN)) if interleaved else (None, None)
    plain = ExpertWeights(gate_up.values(), biases[0], down.values(), biases[1], gate)
    coded = plan_experts(plain._replace(codes=(gate_up, down)))
    assert coded.kinds == ("codes", "grouped")
    for num_tokens in (1, 30, 100, 300, 600):
        x = random(num_tokens, HIDDEN) / HIDDEN**0.5
        experts = torch.rand(num_tokens, EXPERTS, device="cuda").topk(2).indices.int().contiguous()
        scales = torch.rand(num_tokens, 2, device="cuda")
        expected = plan_experts(plain).parts(x, experts, scales)
        assert error(coded.parts(x, experts, scales), expected.double()) < 1e-2, num_tokens


_COMPILE = """
from graftlm.kernels.codes.code_tiles import lines_layout
from graftlm.kernels.codes.matmul import boxes_layout
boxes = lambda of, height: f"tensordesc<{{of}}[{{height}}, 32],{{lines_layout()!r}}>"
signature = dict(codes=boxes("i32", 64), scale_tiles=boxes("fp32", 8), out="*bf16",
    x_tiles=f"tensordesc<bf16[4, {rows}, 64],{{boxes_layout(64)!r}}>")
signature |= dict.fromkeys(("weight_scales", "bias", "routing"), "*fp32")
signature |= dict.fromkeys(("block_expert", "block_start", "block_end", "pairs", "used"), "*i32")
signature |= dict.fromkeys(("items_of", "blocks_of", "steps", "tiles", "n", "top_k", "out_rank"), "i32")
signature |= dict.fromkeys(("alpha", "limit", "shift"), "fp32")
given = dict(SHAPE=({rows}, 64, 4, 8, 3, 2, 3 * {each}), SCALE_LINES=2, STAGES=2, FORMAT=(4, "power", "e2m1"),
    OUTPUT=(True, True, True), EARLY=True, REGISTERS=120, PDL=True)
"""


@pytest.mark.parametrize(("rows", "each"), [(16, 2), (32, 1)])
def test_it_compiles_for_hopper(rows: int, each: int) -> None:
    """each: blocks of outputs of a team"""
    compile_for_hopper("codes.experts", "_coded_experts", _COMPILE.format(rows=rows, each=each), "bf16", 120)


def test_shapes_without_tiles_are_told_apart() -> None:
    fits, narrow = quantised(256, 256, zero=8), quantised(96, 256, zero=8)
    assert coded_problem(fits, fits, 4) is None
    assert "24 outputs of an expert" in (coded_problem(fits, narrow, 4) or "")
