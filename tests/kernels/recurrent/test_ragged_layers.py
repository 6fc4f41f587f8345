"""Convolution, delta rule and scan over ragged steps, against loops over the tokens of one sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from graftlm.kernels.recurrent.convolution import causal_convolution
from graftlm.kernels.recurrent.delta_rule import DeltaInputs, delta_rule
from graftlm.kernels.recurrent.selective_scan import ScanInputs, selective_scan
from graftlm.kernels.recurrent.state_step import RaggedRows, StateStep

CPU = torch.device("cpu")
LENGTHS = (150, 70, 9)
"""Tokens of three sequences: more and fewer than a chunk of 64."""

CUTS = [(150,), (149, 1), (64, 86), (1, 1, 100, 48), (30, 31, 32, 57)]
"""How the tokens of the longest sequence are spread over steps."""

Layer = Callable[[torch.Tensor, torch.Tensor, StateStep], torch.Tensor]


def step_of(counts: list[int], slots: list[int]) -> StateStep:
    """Build a step of rows with so many new tokens each, those of one token first."""
    num_decode = counts.count(1)
    assert counts[:num_decode] == [1] * num_decode
    ragged = None
    if num_decode < len(counts):
        ragged = RaggedRows(np.array(counts[num_decode:]), np.array(slots[num_decode:]), CPU)
    return StateStep(num_decode, torch.tensor(slots[:num_decode], dtype=torch.int64), ragged)


def run_in_steps(layer: Layer, sequences: list[torch.Tensor], states: torch.Tensor, cuts: tuple[int, ...]) -> list:
    """Run the longest sequence in pieces of `cuts` tokens, the others beside it as far as they go."""
    done, outputs = [0] * len(sequences), [[] for _ in sequences]
    for cut in cuts:
        rows = []
        for number, sequence in enumerate(sequences):
            wanted = cut if number == 0 else max(1, cut // 2)
            new = min(wanted, len(sequence) - done[number])
            if new:
                rows.append((number, new))
        rows.sort(key=lambda row: row[1] > 1)
        x = torch.cat([sequences[n][done[n] : done[n] + new] for n, new in rows])
        out = layer(x, states, step_of([new for _, new in rows], [n + 2 for n, _ in rows]))
        for (number, new), part in zip(rows, out.split([new for _, new in rows]), strict=True):
            outputs[number].append(part)
            done[number] += new
    return [torch.cat(parts) for parts in outputs]


def sequences(width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, width, generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("cuts", CUTS)
def test_a_convolution_goes_on_where_the_last_step_ended(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator)
    given = sequences(6)
    states = torch.zeros(5, 6, 3)
    found = run_in_steps(
        lambda x, s, step: causal_convolution(x, s, step, weight, bias, silu=True), given, states, cuts
    )
    for x, out in zip(given, found, strict=True):
        whole = torch.nn.functional.conv1d(x.T[None], weight[:, None], bias, padding=3, groups=6)[0, :, : len(out)].T
        torch.testing.assert_close(out, torch.nn.functional.silu(whole))
    torch.testing.assert_close(states[2], given[0][-3:].T)


def delta_inputs(x: torch.Tensor) -> DeltaInputs:
    """Cut random numbers [num_tokens, 2*4*2 + 4*5 + 8] into the inputs of four heads, two of q and k.

    Of 12 more numbers each channel of a key has a decay, some so strong that its inverse would overflow.
    """
    q, k, v, decay, beta = x.split([8, 8, 20, x.shape[1] - 40, 4], -1)
    shaped = q.unflatten(1, (2, 4)), k.unflatten(1, (2, 4)), v.unflatten(1, (4, 5))
    decay = -torch.nn.functional.softplus(decay)
    if decay.shape[1] == 16:
        decay = decay.unflatten(1, (4, 4)) * torch.tensor([0.1, 1.0, 10.0, 60.0])
    return DeltaInputs(*shaped, decay, beta.sigmoid())


def delta_loop(x: torch.Tensor) -> torch.Tensor:
    q, k, v, decay, beta = delta_inputs(x)
    unit = torch.nn.functional.normalize
    q, k = unit(q, dim=-1).repeat_interleave(2, 1) / 2, unit(k, dim=-1).repeat_interleave(2, 1)
    state, outputs = torch.zeros(4, 4, 5), []
    for t in range(len(x)):
        state = state * decay[t].exp().view(4, -1, 1)
        change = (v[t] - torch.einsum("hk,hkv->hv", k[t], state)) * beta[t][:, None]
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outputs)


@pytest.mark.parametrize("width", [44, 56], ids=["a decay of a head", "of each channel"])
@pytest.mark.parametrize("cuts", CUTS)
def test_the_delta_rule_in_chunks_is_the_loop_over_tokens(cuts: tuple[int, ...], width: int) -> None:
    given = sequences(width)
    found = run_in_steps(lambda x, s, step: delta_rule(delta_inputs(x), s, step), given, torch.zeros(5, 4, 4, 5), cuts)
    for x, out in zip(given, found, strict=True):
        torch.testing.assert_close(out, delta_loop(x)[: len(out)], rtol=1e-4, atol=1e-5)


A = -torch.tensor([0.3, 1.0, 2.0, 5.0])
SKIP = torch.tensor([0.0, 1.0, -1.0, 0.5])


def scan_inputs(x: torch.Tensor) -> ScanInputs:
    """Cut random numbers [num_tokens, 12 + 4 + 10 + 10] into the inputs of four heads, two of B and C."""
    inner, dt, b, c = x.split([12, 4, 10, 10], -1)
    shaped = b.unflatten(1, (2, 5)), c.unflatten(1, (2, 5))
    return ScanInputs(inner.unflatten(1, (4, 3)), torch.nn.functional.softplus(dt), *shaped)


def scan_loop(x: torch.Tensor) -> torch.Tensor:
    inner, dt, b, c = scan_inputs(x)
    b, c = b.repeat_interleave(2, 1), c.repeat_interleave(2, 1)
    state, outputs = torch.zeros(4, 3, 5), []
    for t in range(len(x)):
        state = state * (dt[t] * A).exp()[:, None, None]
        state = state + torch.einsum("hp,hn->hpn", inner[t] * dt[t][:, None], b[t])
        outputs.append(torch.einsum("hpn,hn->hp", state, c[t]) + SKIP[:, None] * inner[t])
    return torch.stack(outputs)


@pytest.mark.parametrize("cuts", CUTS)
def test_the_selective_scan_in_chunks_is_the_loop_over_tokens(cuts: tuple[int, ...]) -> None:
    given = sequences(36)
    layer = run_in_steps(
        lambda x, s, step: selective_scan(scan_inputs(x), A, SKIP, s, step), given, torch.zeros(5, 4, 3, 5), cuts
    )
    for x, out in zip(given, layer, strict=True):
        torch.testing.assert_close(out, scan_loop(x)[: len(out)], rtol=1e-4, atol=1e-5)
