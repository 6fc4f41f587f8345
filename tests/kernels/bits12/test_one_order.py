"""Weights in 12 bits give the bits of those in 16 in strict mode. Without a GPU the kernel is compiled only."""

from __future__ import annotations

from types import ModuleType
from typing import get_args

import pytest
import torch

from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.bits12.weight_codec import INPUTS, LARGEST_TILE_LIST, OUTPUTS, compacted, encode, listed_by_tile
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.jit.precompile import compile_together
from graftlm.kernels.linear_dispatch import plan
from graftlm.kernels.linear_kernels import Bits12OneOrder, OneOrder, Role
from tests.kernels.bits12.test_matmul import listed
from tests.kernels.gluon import check_chain, compile_for_hopper, random

ROWS = [1, 2, 15, 16, 17, 31, 32]


def kernel() -> ModuleType:
    found = gluon_kernel("bits12.one_order")
    assert found is not None
    return found


def both(
    weight: torch.Tensor, role: Role, bias: torch.Tensor | None, activation: Activation, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    held = Bits12Weight(weight)
    found = [kernel.make(held, role, bias, activation) for kernel in (OneOrder(), Bits12OneOrder())]
    assert found[0] is not None and found[1] is not None
    return found[0](x), found[1](x)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(
    ("n", "k"), [(1000, 256), (6144, 1024), (1024, 4096), (896, 4864), (632, 448), (64 * 301, 512)]
)
@pytest.mark.parametrize("role", ["qkv", "add", "head"])
def test_every_sum_has_the_bits_of_the_weight_in_16(role: Role, n: int, k: int, num_rows: int) -> None:
    x, weight = random(num_rows, k), listed(random(n, k) / k**0.5)
    for bias in (None, random(n)):
        expected, found = both(weight, role, bias, "silu", x)
        assert found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 20, 32])
@pytest.mark.parametrize(("n", "k"), [(512, 512), (1032, 448), (64 * 150, 256)])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gates_have_the_bits_of_the_weight_in_16(activation: Activation, n: int, k: int, num_rows: int) -> None:
    x, weight = random(num_rows, k), listed(random(2 * n, k) / k**0.5)
    expected, found = both(weight, "gate_up", None, activation, x)
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_inputs_of_very_different_sizes_give_the_same_bits() -> None:
    x = (
        torch.randn(20, 2048, device="cuda") * torch.exp2(torch.randint(-40, 20, (20, 2048), device="cuda"))
    ).bfloat16()
    weight = random(512, 2048) * torch.exp2(torch.randint(-60, 40, (512, 1), device="cuda")).bfloat16()
    expected, found = both(listed(weight), "qkv", None, "silu", x)
    assert torch.isfinite(expected).all() and torch.equal(found, expected)


@pytest.mark.gpu
def test_nothing_is_written_beside_the_result() -> None:
    x, weight = random(20, 512), kernel().held(compacted(random(1000, 512)))
    room = torch.full((21, 1000), 7.0, dtype=torch.bfloat16, device="cuda")
    kernel().launch(x, weight, room[None, :20])
    assert bool((room[:20] != 7).any()) and bool((room[20:] == 7).all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 32])
def test_weights_read_early_see_all_that_the_kernels_before_wrote(num_rows: int) -> None:
    weights = [listed(random(2048, 2048) / 2048**0.5) for _ in range(6)]
    plans = []
    for weight in weights:
        inner, outer = (Bits12OneOrder().make(Bits12Weight(weight), role) for role in ("qkv", "add"))
        assert inner is not None and outer is not None
        plans.append(lambda x, inner=inner, outer=outer: outer(inner(x)))
    check_chain(num_rows, weights, plans)


@pytest.mark.gpu
def test_strict_plans_take_it_for_few_rows() -> None:
    linear = plan(
        Bits12Weight(random(512, 1024)), "qkv", agree=lambda a, b: torch.allclose(a, b, atol=0.1),
        linear=torch.nn.functional.linear,
    )  # fmt: skip
    assert linear.kinds == ("bits12_one_order", "one_order")
    x = random(64, 1024)
    assert torch.equal(linear.matmul(x)[:32], linear.matmul(x[:32]))


@pytest.mark.gpu
def test_a_dry_run_finds_the_kernel() -> None:
    kernel()._one_order.device_caches.clear()  # what other tests of this process have compiled
    x, weight = random(3, 640), kernel().held(compacted(random(520, 640)))
    out = torch.empty(1, 3, 520, dtype=torch.bfloat16, device="cuda")
    assert compile_together(lambda: kernel().launch(x, weight, out), x.device) == 1


def test_listed_weights_are_told_tile_by_tile() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 448, generator=generator).bfloat16()
    place = torch.randperm(weight.numel(), generator=generator)[:90]
    odd = torch.tensor([0.0, 1e-9, -1e-20, 300.0, -0.0]).bfloat16()
    weight.view(-1)[place] = odd[torch.arange(90) % 5]
    codes = encode(weight)
    assert codes is not None
    tiles = listed_by_tile(codes)
    assert tiles is not None and tiles.shape == (4 * 4, LARGEST_TILE_LIST + 1)
    found = {}
    for tile, words in enumerate(tiles.tolist()):
        first, all_of_it = words[0] & 255, words[0] >> 8
        for place, word in enumerate(words[1 : 1 + all_of_it]):
            output = tile // 4 * OUTPUTS + (word >> 6 & 63)
            column = tile % 4 * INPUTS + (64 if place >= first else 0) + (word & 63)
            found[output, column] = word >> 16 & 0xFFFF
    outputs = torch.repeat_interleave(torch.arange(len(codes.scales)), codes.starts.diff()).tolist()
    values = (codes.values.bfloat16().view(torch.int16).int() & 0xFFFF).tolist()
    assert found == dict(zip(zip(outputs, codes.inputs.tolist(), strict=True), values, strict=True))
    assert len(found) >= 90


def test_a_tile_with_too_many_has_no_such_list() -> None:
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[:40, 5] = 1e-12
    codes = encode(weight)
    assert codes is not None and listed_by_tile(codes) is None


@pytest.mark.parametrize(("rows", "groups", "out", "gate"), [(16, 1, "fp32", False), (32, 2, "bf16", True)])
def test_it_compiles_for_hopper_and_fits_its_shared_memory(rows: int, groups: int, out: str, gate: bool) -> None:
    arguments = f"""
codes = f"tensordesc<i32[32, 32],{{kernel.codes_layout()!r}}>"
lists = f"tensordesc<i32[1, 32],{{kernel.lists_layout()!r}}>"
signature = dict(x_tiles=tile({rows}, 64), codes=codes, listed=lists, scales="*fp32", bias="*bf16", out="*{out}")
signature |= dict.fromkeys(["num_rows", "n", "num_blocks", "num_items", "steps", "tiles"], "i32")
given = dict(ROWS={rows}, K=64, GROUPS={groups}, STAGES=kernel.stages_of({rows}, {groups}), BIAS=False, GATE={gate},
    ACTIVATION="silu", REGISTERS=96, PDL=True)
"""
    compile_for_hopper("bits12.one_order", "_one_order", arguments, "bf16", registers=96)
