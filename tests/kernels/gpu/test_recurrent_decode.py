"""Decode rows of layers with a state against the definitions in torch; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graftlm.kernels.gpu.recurrent_decode import DeltaWeights, convolve, gated_delta, scan
from graftlm.kernels.recurrent.convolution import _decode as convolve_in_torch
from graftlm.kernels.recurrent.delta_rule import EPSILON, DeltaInputs, delta_rule
from graftlm.kernels.recurrent.selective_scan import ScanInputs, selective_scan
from graftlm.kernels.recurrent.state_step import StateStep
from tests.kernels.gpu.test_elementwise import random


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_a_convolution_moves_each_rows_inputs_on(taps: int, silu: bool) -> None:
    x, cached, slots = random(3, 300), random(6, 300, taps - 1), torch.tensor([4, 2, 5]).to(random(1).device)
    weight, bias = random(300, taps), random(300)
    expected_cache = cached.clone()
    expected = convolve_in_torch(x, expected_cache, slots, weight) + bias
    found = convolve(x, cached, slots, weight, bias, silu=silu)
    torch.testing.assert_close(found, F.silu(expected) if silu else expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(cached, expected_cache)


def test_a_convolution_reads_channels_where_the_columns_say() -> None:
    x, cached, weight = random(2, 50), random(4, 20, 3), random(20, 4)
    columns, slots = torch.randperm(50)[:20].to(x.device), torch.tensor([3, 2]).to(x.device)
    expected = convolve(x[:, columns].contiguous(), cached.clone(), slots, weight, None, silu=True)
    assert torch.equal(convolve(x, cached, slots, weight, None, silu=True, columns=columns), expected)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(16, 64), (12, 40)])
def test_the_gated_delta_rule_of_one_token(k_dim: int, v_dim: int) -> None:
    heads, k_heads, rows = 4, 2, 3
    mixed, states = random(rows, 2 * k_heads * k_dim + heads * v_dim), random(6, heads, k_dim, v_dim)
    b, a, z = random(rows, heads), random(rows, heads), random(rows, heads * v_dim)
    weights = DeltaWeights(k_heads, random(heads), random(heads), random(v_dim), 1e-6)
    slots = torch.tensor([5, 2, 3]).to(mixed.device)
    q, k, v = mixed.split([k_heads * k_dim, k_heads * k_dim, heads * v_dim], -1)
    inputs = DeltaInputs(
        q.unflatten(1, (-1, k_dim)),
        k.unflatten(1, (-1, k_dim)),
        v.unflatten(1, (-1, v_dim)),
        -weights.a_log.exp() * F.softplus(a + weights.dt_bias),
        b.sigmoid(),
    )
    expected_states = states.clone()
    out = delta_rule(inputs, expected_states, StateStep(rows, slots))
    normed = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm_weight
    expected = normed.flatten(1) * F.silu(z)
    b, a, z = (gate.unflatten(1, (k_heads, -1)) for gate in (b, a, z))
    found = gated_delta(weights, mixed, (b, a, z), states, slots, EPSILON)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dim", "heads", "bound"), [(16, 4, None), (40, 2, -5.0)])
def test_the_delta_rule_of_one_token_with_decays_by_channel(dim: int, heads: int, bound: float | None) -> None:
    rows = 3
    mixed, states = random(rows, 3 * heads * dim), random(6, heads, dim, dim)
    beta, a, z = random(rows, heads), 8 * random(rows, heads, dim), random(rows, heads, dim)
    weights = DeltaWeights(heads, random(heads), random(heads * dim), random(dim), 1e-6, True, 2.0, bound)
    slots = torch.tensor([5, 2, 3]).to(mixed.device)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in mixed.split([heads * dim] * 3, -1))
    rate, a_biased = weights.a_log.exp()[:, None], a + weights.dt_bias.view(heads, dim)
    decay = -rate * F.softplus(a_biased) if bound is None else bound * (rate * a_biased).sigmoid()
    expected_states = states.clone()
    out = delta_rule(DeltaInputs(q, k, v, decay, 2 * beta.sigmoid()), expected_states, StateStep(rows, slots))
    normed = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm_weight
    found = gated_delta(weights, mixed, (beta[..., None], a, z), states, slots, EPSILON)
    torch.testing.assert_close(found, (normed * z.sigmoid()).flatten(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dim", "state_dim"), [(16, 32), (20, 12)])
def test_the_selective_scan_of_one_token(dim: int, state_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, groups, rows = 4, 2, 3
    mixed, states = random(rows, heads * dim + 2 * groups * state_dim), random(6, heads, dim, state_dim)
    x, b, c = mixed.split([heads * dim, groups * state_dim, groups * state_dim], -1)
    inputs = ScanInputs(
        x.unflatten(1, (-1, dim)), F.softplus(random(rows, heads)), *(y.unflatten(1, (groups, -1)) for y in (b, c))
    )
    a, slots, expected_states = -random(heads).exp(), torch.tensor([5, 2, 3]).to(mixed.device), states.clone()
    monkeypatch.setattr("graftlm.kernels.recurrent.selective_scan.triton_problem", lambda _: "compared with")
    expected = selective_scan(inputs, a, torch.zeros_like(a), expected_states, StateStep(rows, slots))
    torch.testing.assert_close(scan(*inputs, a, states, slots), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)
