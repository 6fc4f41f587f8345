"""The kernels of mixtures against float32 definitions: the sort by expert, grouped products, routers."""

from __future__ import annotations

import itertools

import pytest
import torch

from graftlm.core.fusion.expert_modules import apply_gate
from graftlm.core.fusion.expert_routers import chosen
from graftlm.kernels.expert_dispatch import plan_experts
from graftlm.kernels.gpu.mixture.expert_blocks import ExpertBlocks
from graftlm.kernels.gpu.mixture.expert_plan import ExpertPlan, ExpertTiles, ExpertWeights, fitted
from graftlm.kernels.gpu.mixture.expert_router import route
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate, Tile, grouped_down, grouped_gate_up, sum_parts
from graftlm.kernels.gpu.mixture.router import Router

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter cuts bfloat16 off
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - expected.double()).norm() / expected.double().norm() < TOLERANCE[dtype])


def routing(rows: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    experts = torch.rand(rows, num_experts, device=DEVICE).topk(top_k, -1).indices.int()
    return experts.contiguous(), torch.rand(rows, top_k, device=DEVICE)


def weights_of(
    num_experts: int, inner: int, hidden: int, gate: Gate, dtype: torch.dtype, *, bias: bool
) -> ExpertWeights:
    rows = inner * (2 if gate.gated else 1)
    up, down = random(num_experts, rows, hidden, dtype=dtype) / 4, random(num_experts, hidden, inner, dtype=dtype) / 4
    biases = [random(num_experts, n, dtype=dtype) if bias else None for n in (rows, hidden)]
    return ExpertWeights(up, biases[0], down, biases[1], gate)


def defined(
    x: torch.Tensor, weights: ExpertWeights, experts: torch.Tensor, scales: torch.Tensor, *, scale_input: bool = False
) -> torch.Tensor:
    """The mixture of x, token by token, in float64."""
    up, up_bias, down, down_bias = (t.double() if t is not None else None for t in weights[:4])
    assert up is not None and down is not None
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, rank in itertools.product(range(len(x)), range(experts.shape[1])):
        e, scale = int(experts[token, rank]), scales[token, rank].double()
        both = up[e] @ (x[token].double() * (scale if scale_input else 1.0))
        hidden = apply_gate(weights.gate, both if up_bias is None else both + up_bias[e])
        result = down[e] @ hidden
        out[token] += (result if down_bias is None else result + down_bias[e]) * (1.0 if scale_input else scale)
    return out


@pytest.mark.parametrize(("rows", "num_experts", "top_k", "block"), [(1, 5, 2, 16), (7, 6, 3, 16), (700, 3, 2, 32)])
def test_pairs_are_sorted_by_expert_in_blocks_of_one_expert(
    rows: int, num_experts: int, top_k: int, block: int
) -> None:
    experts, _ = routing(rows, num_experts, top_k)
    experts[experts == num_experts - 1] = 0  # one that nobody asks for
    x = random(rows, 600)
    found = ExpertBlocks.of(experts, num_experts, block, lay_out=x)
    flat = experts.flatten().long()
    assert found.pairs.tolist() == torch.sort(flat, stable=True).indices.tolist()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    expected, begin = [], 0
    for expert, count in enumerate(counts):
        expected += [(expert, first, begin + count) for first in range(begin, begin + count, block)]
        begin += count
    used = len(expected)
    table = (found.block_expert, found.block_start, found.block_end)
    assert list(zip(*(column[:used].tolist() for column in table), strict=True)) == expected
    assert found.used.tolist() == [used] and found.laid is not None
    for number, (_, first, end) in enumerate(expected):
        tokens = found.pairs[first : min(first + block, end)].long() // top_k
        assert torch.equal(found.laid[number * block :][: len(tokens)], x[tokens])
    assert found.block_expert[used:].tolist() == [-1] * (len(found.block_expert) - used)


GATES = [
    Gate(),
    Gate("gelu_tanh"),
    Gate("gelu"),
    Gate("relu2", gated=False),
    Gate("silu", 1.7, 1.0, 1.0, interleaved=True),
    Gate("silu", limit=0.5),
]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: f"{gate.activation}-{gate.limit}-{gate.gated}")
def test_a_mixture_is_the_weighted_sum_of_its_experts(gate: Gate, swap: bool) -> None:
    weights = weights_of(5, 40, 48, gate, torch.float32, bias=gate.limit is not None)
    x = random(9, 48)
    experts, scales = routing(9, 5, 3)
    tile = Tile(16, 32, 32, 4, 2, swap=swap)
    plan = ExpertPlan(weights, (ExpertTiles(1e9, tile, tile),))
    found = sum_parts(plan.parts(x, experts, scales), x.dtype)
    assert close(found, defined(x, weights, experts, scales), torch.float32)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_tiles_of_all_kinds_compute_the_same_in_half_precision(tma: bool, group: int) -> None:
    weights = weights_of(4, 32, 64, Gate(), HALF, bias=False)
    x = random(40, 64, dtype=HALF)
    experts, scales = routing(40, 4, 2)
    for swap, pairs in itertools.product((False, True), (16, 32)):
        tile = Tile(pairs, 64, 64, 4, 2, swap, group, tma)
        blocks = ExpertBlocks.of(experts, 4, pairs)
        hidden = grouped_gate_up(x, weights.gate_up, None, blocks, 2, Gate(), fitted(tile, weights.gate_up, x, 2))
        down = fitted(tile, weights.down, x, 1)
        parts = grouped_down(hidden, weights.down, None, scales, blocks, 2, down, torch.float32)
        assert close(sum_parts(parts, torch.float32), defined(x, weights, experts, scales), HALF)


def test_weights_may_lie_with_inputs_first_and_scale_the_input() -> None:
    weights = weights_of(3, 24, 40, Gate(), torch.float32, bias=False)
    turned = weights._replace(
        gate_up=weights.gate_up.transpose(1, 2).contiguous().transpose(1, 2),
        down=weights.down.transpose(1, 2).contiguous().transpose(1, 2),
    )
    x = random(6, 40)
    experts, scales = routing(6, 3, 1)
    parts = plan_experts(turned).parts(x, experts, scales, scale_input=True)
    assert close(parts.sum(0), defined(x, weights, experts, scales, scale_input=True), torch.float32)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_tiles_of_the_table_compute_the_mixture(rows: int) -> None:
    weights = weights_of(2, 48, 64, Gate(), torch.float32, bias=False)
    x = random(rows, 64)
    experts, scales = routing(rows, 2, 2)
    assert close(plan_experts(weights).parts(x, experts, scales).sum(0), defined(x, weights, experts, scales), x.dtype)


def test_strict_results_do_not_depend_on_the_other_tokens() -> None:
    weights = weights_of(4, 32, 64, Gate(), torch.float32, bias=False)
    x = random(30, 64)
    router = Router(random(4, 64), 2, renormalize=True)

    def run(rows: torch.Tensor) -> torch.Tensor:
        plan = plan_experts(weights, strict=True)
        return sum_parts(plan.parts(rows, *route(rows, router, strict=True)), rows.dtype)

    whole = run(x)
    for rows in (slice(0, 1), slice(3, 9), slice(5, 30)):
        if ON_GPU:  # the products of Triton's interpreter do depend on where a row is
            assert torch.equal(run(x[rows]), whole[rows])
        else:
            assert close(run(x[rows]), whole[rows], torch.float32)


ROUTERS = {
    "softmax": {},
    "softmax, renormalised": {"renormalize": True},
    "of the chosen": {"score": "logits", "after": "softmax"},
    "sigmoid of the chosen": {"score": "logits", "after": "sigmoid"},
    "sigmoid, corrected": {"score": "sigmoid", "correction": 16, "renormalize": True, "eps": 1e-20, "scale": 2.5},
    "groups, two": {"score": "sigmoid", "correction": 16, "num_groups": 4, "top_groups": 2},
    "groups, best": {"num_groups": 4, "top_groups": 1, "group_score": "best", "scale": 16.0},
    "bias": {"bias": 16},
}


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("rows", [1, 9])
def test_routers_choose_and_weigh_as_defined(name: str, rows: int) -> None:
    options = {k: random(v) if k in ("bias", "correction") else v for k, v in ROUTERS[name].items()}
    router = Router(random(16, 70), 3, **options)
    x = random(rows, 70)
    experts, weights = route(x, router)
    expected, expected_weights = chosen(router, x)
    assert experts.tolist() == expected.tolist()
    assert close(weights, expected_weights, torch.float32)


def test_a_number_of_experts_that_is_no_power_of_two_and_many_tokens() -> None:
    router = Router(random(24, 32), 4)
    x = random(1000 if ON_GPU else 20, 32)
    experts, weights = route(x, router)
    expected, expected_weights = chosen(router, x)
    assert experts.tolist() == expected.tolist()
    assert close(weights, expected_weights, torch.float32)
