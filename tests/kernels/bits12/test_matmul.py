"""Products of few rows with weights in 12 bits. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from types import ModuleType
from typing import get_args

import pytest
import torch

from graftlm.kernels.activation import Activation, gate_by_torch
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.bits12.weight_codec import CompactWeight, compacted
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.jit.precompile import compile_together
from tests.kernels.gluon import check_chain, compile_for_hopper, error, random

TOLERANCE = 5e-3
"""One rounding of the result."""


def kernel() -> ModuleType:
    found = gluon_kernel("bits12.matmul")
    assert found is not None
    return found


def listed(weight: torch.Tensor) -> torch.Tensor:
    """The weight with some that have no code: zeros, all but zeros, and large ones."""
    num = weight.numel() // 4000
    place = torch.randperm(weight.numel(), device="cuda")[:num]
    odd = torch.tensor([0.0, 1e-9, -1e-20, 300.0, -0.0], device="cuda").bfloat16()
    weight.view(-1)[place] = odd[torch.arange(num, device="cuda") % len(odd)]
    return weight


def coded(weight: torch.Tensor, *, gates: bool = False) -> CompactWeight:
    assert Bits12Weight.suits(weight)
    found = compacted(weight, gates=gates)
    assert found is not None
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 31, 32])
@pytest.mark.parametrize(("n", "k"), [(1000, 256), (6144, 1024), (1024, 4096), (896, 4864), (632, 448)])
def test_every_row_and_output_is_its_sum(n: int, k: int, num_rows: int) -> None:
    x, weight, bias = random(num_rows, k), listed(random(n, k) / k**0.5), random(n)
    compact = coded(weight)
    assert len(compact.inputs) >= weight.numel() // 4000
    product = x.double() @ weight.double().t()
    assert error(kernel().compact_matmul(x, compact), product) < TOLERANCE
    assert error(kernel().compact_matmul(x, compact, bias), product + bias.double()) < TOLERANCE
    assert error(kernel().compact_parts(x, compact).sum(0), product) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 20, 32])
@pytest.mark.parametrize(("n", "k"), [(512, 512), (1032, 448), (64 * 150, 256)])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_are_inside(activation: Activation, n: int, k: int, num_rows: int) -> None:
    x, weight = random(num_rows, k), listed(random(2 * n, k) / k**0.5)
    gate, up = (x.double() @ weight.double().t()).bfloat16().double().chunk(2, -1)
    activated = gate_by_torch(torch.cat([gate, torch.ones_like(gate)], -1), activation)
    expected = activated.bfloat16().double() * up  # rounded where separate kernels round
    assert error(kernel().compact_gate_up(x, coded(weight, gates=True), activation), expected) < 2 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "k"), [(1, 1536), (20, 512), (20, 1152), (32, 1088)])
def test_more_blocks_than_programs_run_at_once(num_rows: int, k: int) -> None:
    x, weight = random(num_rows, k), listed(random(64 * 301, k))
    assert error(kernel().compact_matmul(x, coded(weight)), x.double() @ weight.double().t()) < TOLERANCE


@pytest.mark.gpu
def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x, weight = random(5, 512), listed(random(256, 512))
    compact, expected = coded(weight), x.double() @ weight.double().t()
    x[2, 7], x[3, 9] = float("nan"), float("inf")
    found = kernel().compact_matmul(x, compact)
    assert error(found[[0, 1, 4]], expected[[0, 1, 4]]) < TOLERANCE
    assert not bool(torch.isfinite(found[2:4]).any())


@pytest.mark.gpu
def test_nothing_is_written_beside_the_result() -> None:
    x, compact = random(20, 512), coded(random(1000, 512))
    room = torch.full((21, 1000), 7.0, dtype=torch.bfloat16, device="cuda")
    kernel().launch(x, compact, room[None, :20])
    assert torch.equal(room[:20], kernel().compact_matmul(x, compact))
    assert bool((room[20:] == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 32])
def test_weights_read_early_see_all_that_the_kernels_before_wrote(num_rows: int) -> None:
    weights = [listed(random(2048, 2048) / 2048**0.5) for _ in range(6)]
    codes = [coded(weight) for weight in weights]
    check_chain(
        num_rows, weights, [lambda x, c=c: kernel().compact_parts(kernel().compact_matmul(x, c), c) for c in codes]
    )


@pytest.mark.gpu
def test_a_dry_run_finds_the_kernel() -> None:
    kernel()._compact.device_caches.clear()  # what other tests of this process have compiled
    x, weight = random(3, 640), random(520, 640)
    compact = coded(weight)
    assert compile_together(lambda: kernel().compact_matmul(x, compact), x.device) == 1
    assert error(kernel().compact_matmul(x, compact), x.double() @ weight.double().t()) < TOLERANCE


@pytest.mark.gpu
def test_weights_that_it_cannot_take_are_told_apart() -> None:
    taken = random(128, 512)
    assert Bits12Weight.suits(taken)
    assert not Bits12Weight.suits(taken.half())
    assert not Bits12Weight.suits(taken[:, :256])  # not dense
    assert not Bits12Weight.suits(random(128, 192))  # too few inputs


def test_a_form_that_gains_nothing_is_none() -> None:
    weight = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert compacted(weight) is not None
    assert compacted(weight[:16]) is None  # whole tiles take more than it does
    weight[:, :2] *= 1e-12
    assert compacted(weight) is None  # 1 in 512 has no code
    assert compacted(weight[: 2 * 12, 2:], gates=True) is None  # not in eights


def test_a_weight_on_the_cpu_is_not_taken() -> None:
    assert not Bits12Weight.suits(torch.empty(128, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize(("rows", "out", "gate"), [(16, "fp32", False), (32, "bf16", True)])
def test_it_compiles_for_hopper_and_fits_its_shared_memory(rows: int, out: str, gate: bool) -> None:
    arguments = f"""
codes = f"tensordesc<i32[32, 32],{{kernel.codes_layout()!r}}>"
signature = dict(x="*bf16", x_tiles=tile({rows}, 64), codes=codes, bias="*bf16", out="*{out}")
signature |= dict.fromkeys(["starts", "most", "inputs"], "*i32") | dict.fromkeys(["values", "scales"], "*fp32")
signature |= dict.fromkeys(["num_rows", "k", "n", "num_blocks", "num_items", "steps", "tiles"], "i32")
given = dict(ROWS={rows}, K=64, STAGES=kernel.stages_of({rows}), BIAS=False, GATE={gate}, ACTIVATION="silu",
    REGISTERS=96, PDL=True)
"""
    compile_for_hopper("bits12.matmul", "_compact", arguments, "bf16", registers=96)
