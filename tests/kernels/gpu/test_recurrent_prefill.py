"""Rows of several tokens of layers with a state against the definitions in torch; in Triton's interpreter on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graftlm.kernels.gpu.recurrent_prefill import convolve_rows, delta_chunks
from graftlm.kernels.recurrent.convolution import causal_convolution
from graftlm.kernels.recurrent.delta_rule import DeltaInputs, delta_rule
from graftlm.kernels.recurrent.state_step import RaggedRows, StateStep
from tests.kernels.gpu.test_elementwise import DEVICE, random

LENGTHS = [5, 70, 18]


def ragged(lengths: list[int]) -> StateStep:
    rows = RaggedRows(np.array(lengths), np.array([4, 2, 5][: len(lengths)]), torch.device(DEVICE))
    return StateStep(0, torch.empty(0, dtype=torch.int64, device=DEVICE), rows)


@pytest.mark.parametrize("lengths", [LENGTHS, [2]])
def test_a_convolution_of_rows_reads_cached_inputs_and_columns(lengths: list[int]) -> None:
    step, cached, weight, bias = ragged(lengths), random(6, 20, 3), random(20, 4), random(20)
    x, columns = random(sum(lengths), 50), torch.randperm(50)[:20].to(DEVICE)
    expected_cache = cached.clone()
    expected = causal_convolution(x[:, columns], expected_cache, step, weight, bias, silu=True)
    assert step.ragged is not None
    found = convolve_rows(x, cached, step.ragged, weight, bias, silu=True, columns=columns)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(cached, expected_cache)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(16, 64), (12, 20)])
def test_the_gated_delta_rule_in_chunks(k_dim: int, v_dim: int) -> None:
    heads, k_heads, step, count = 2, 1, ragged(LENGTHS), sum(LENGTHS)
    q, k = random(count, k_heads, k_dim), random(count, k_heads, k_dim)
    k[7:12] = k[6]  # equal keys: what one writes the next ones read
    decay, beta = -F.softplus(random(count, heads)), random(count, heads).sigmoid()
    inputs, states = DeltaInputs(q, k, random(count, heads, v_dim), decay, beta), random(6, heads, k_dim, v_dim)
    expected_states = states.clone()
    expected = delta_rule(inputs, expected_states, step)
    assert step.ragged is not None
    found = delta_chunks(inputs, states, step.ragged)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)
