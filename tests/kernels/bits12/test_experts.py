"""Experts with weights in 12 bits. Without a GPU the kernel is compiled only."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.jit.precompile import compile_together
from tests.kernels.gluon import compile_for_hopper, error, random


def listed(weight: torch.Tensor) -> torch.Tensor:
    """The weight with some that have no code."""
    place = torch.randperm(weight.numel(), device="cuda")[: weight.numel() // 4000]
    odd = torch.tensor([0.0, 1e-9, -1e-20, 300.0, -0.0], device="cuda").bfloat16()
    weight.view(-1)[place] = odd[torch.arange(len(place), device="cuda") % len(odd)]
    return weight


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 130])
@pytest.mark.parametrize(("num_experts", "top_k", "hidden", "inner"), [(8, 2, 512, 256), (32, 6, 256, 768)])
def test_every_token_gets_the_weighted_sum_of_its_experts(
    rows: int, num_experts: int, top_k: int, hidden: int, inner: int
) -> None:
    kernel = gluon_kernel("bits12.experts")
    assert kernel is not None
    up, down = listed(random(num_experts, 2 * inner, hidden) / 16), listed(random(num_experts, hidden, inner) / 16)
    compact_up, compact_down = kernel.compact_experts(up, gates=True), kernel.compact_experts(down, gates=False)
    assert compact_up is not None and compact_down is not None
    x = random(rows, hidden)
    experts = torch.rand(rows, num_experts, device="cuda").topk(top_k, -1).indices.int().contiguous()
    scales = torch.rand(rows, top_k, device="cuda")

    def run() -> torch.Tensor:
        found: torch.Tensor = kernel.compact_parts(x, compact_up, compact_down, experts, scales, num_experts)
        return found

    compile_together(run, x.device)
    found = run()
    expected = torch.zeros(rows, hidden, dtype=torch.float64, device="cuda")
    for token in range(rows):
        for rank in range(top_k):
            e = int(experts[token, rank])
            gate, ups = (x[token].double() @ up[e].double().t()).bfloat16().double().chunk(2)
            inside = (torch.nn.functional.silu(gate).bfloat16().double() * ups).bfloat16().double()
            expected[token] += (inside @ down[e].double().t()) * scales[token, rank].double()
    assert error(found.sum(0), expected) < 5e-3
    assert torch.equal(run(), found)


@pytest.mark.parametrize("pairs", [16, 32])
@pytest.mark.parametrize("gate", [False, True])
def test_it_compiles_for_hopper_and_fits_its_shared_memory(gate: bool, pairs: int) -> None:
    arguments = f"""
codes = f"tensordesc<i32[32, 32],{{kernel.codes_layout()!r}}>"
signature = dict(x="*bf16", x_tiles=tile({pairs}, 64), codes=codes, out="*{"bf16" if gate else "fp32"}")
signature |= dict.fromkeys(["starts", "most", "inputs", "block_expert", "block_start", "block_end"], "*i32")
signature |= dict.fromkeys(["pairs", "used"], "*i32")
signature |= dict.fromkeys(["values", "weight_scales", "routing"], "*fp32")
signature |= dict.fromkeys(["blocks_of", "steps", "k", "n", "top_k", "out_rank"], "i32")
given = dict(ROWS={pairs}, K=64, STAGES=kernel._STAGES[{pairs}], GATE={gate}, REGISTERS=96, PDL=True)
"""
    compile_for_hopper("bits12.experts", "_compact_experts", arguments, "bf16", registers=96)
