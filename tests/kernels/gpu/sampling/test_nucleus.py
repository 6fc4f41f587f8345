"""Sampling without sorting against its definition in float64; without a GPU, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st

from graftlm.kernels.gpu.sampling import nucleus
from graftlm.kernels.gpu.sampling.nucleus import CHUNK, draw_nucleus
from graftlm.kernels.sampling_codes import NOT_FINITE, NOTHING_ALLOWED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAWS = 512 if DEVICE.type == "cuda" else 6
"""Of one row; the interpreter takes most of a second for each."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(
    logits: torch.Tensor, rows: list[tuple[float, float, float]], uniforms: list[float], top_p: bool
) -> list[int]:
    """rows: temperature, top_p, min_p of each"""
    numbers = torch.tensor(rows, device=DEVICE)
    return draw_nucleus(
        logits.to(DEVICE), numbers, torch.tensor(uniforms, device=DEVICE)[:, None], top_p=top_p
    ).tolist()


def kept_weights(logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> np.ndarray:
    """What is drawn from, by sorting."""
    x = logits.double().numpy()
    weights = np.exp((x - x.max()) / np.float32(temperature))
    order = np.argsort(-x, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros_like(weights)
    inside = order[(before < np.float32(top_p) * weights.sum() * (1 - 1e-5)) | (np.arange(len(x)) == 0)]
    kept[inside] = weights[inside]
    return np.where(weights >= np.float32(min_p) * (1 - 1e-6), kept, 0)


def assert_drawn_by(weights: np.ndarray, uniform: float, column: int) -> None:
    """The column lies where the uniform falls, within rounding."""
    ends = np.cumsum(weights) / weights.sum()
    assert (ends[column - 1] if column else 0.0) - 2e-4 <= uniform <= ends[column] + 2e-4


# shrinking would take minutes in the interpreter
@settings(max_examples=300 if DEVICE.type == "cuda" else 6, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([0, 3, 40]),
    spread=st.sampled_from([0.0, 0.3, 4.0, 30.0]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.7, 1.0]),
    temperature=st.sampled_from([0.1, 1.0, 3.0]),
    dtype=st.sampled_from(DTYPES),
    width=st.sampled_from([1, 7, 300, CHUNK, CHUNK + 5]),
)
def test_a_column_is_drawn_from_the_nucleus_in_the_order_of_columns(
    seed: int,
    levels: int,
    spread: float,
    top_p: float,
    min_p: float,
    temperature: float,
    dtype: torch.dtype,
    width: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, width, generator=generator) * spread
    if levels:  # ties
        logits = (logits * levels).round() / levels
    logits = logits.to(dtype)
    uniforms = torch.rand(2, generator=generator).tolist()
    columns = drawn(logits, [(temperature, top_p, min_p)] * 2, uniforms, top_p < 1)
    for row, uniform, column in zip(logits, uniforms, columns, strict=True):
        weights = kept_weights(row, temperature, top_p, min_p)
        # at the edge of the nucleus rounding decides: one token more or less
        assert weights[column] > 0 or row[column] >= row[torch.from_numpy(weights > 0)].min() - 1e-3 * spread - 1e-6
        if (kept := weights > 0).sum() < 50 and spread:
            edge = weights[kept].min() / weights.sum()
            ends = np.cumsum(weights) / weights.sum()
            slack = edge + 2e-4
            assert (ends[column - 1] if column else 0.0) - slack <= uniform <= ends[column] + slack


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_equal_logits_the_first_columns_are_in_the_nucleus(dtype: torch.dtype) -> None:
    logits = torch.full((1, CHUNK + 100), -3.0, dtype=dtype)
    tied = [5, 900, CHUNK - 1, CHUNK + 1, CHUNK + 7, CHUNK + 90]
    logits[0, tied] = 20.0
    uniforms = np.arange(0.04, 1, 0.18).tolist()
    found = set(drawn(logits.expand(len(uniforms), -1).contiguous(), [(1.0, 0.6, 0.0)] * len(uniforms), uniforms, True))
    assert found == set(tied[:4])  # 0.6 of six tokens takes four


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_either_sign_are_equal(dtype: torch.dtype) -> None:
    logits = torch.full((1, 64), -30.0, dtype=dtype)
    logits[0, 3:7] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    uniforms = np.arange(0.04, 1, 0.18).tolist()
    found = drawn(logits.expand(len(uniforms), -1).contiguous(), [(1.0, 0.5, 0.0)] * len(uniforms), uniforms, True)
    assert set(found) == {3, 4}


def test_shares_are_those_of_the_weights() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 40)
    uniforms = ((torch.arange(DRAWS) + 0.5) / DRAWS).tolist()
    columns = drawn(logits.expand(DRAWS, 40).contiguous(), [(0.8, 0.85, 0.0)] * DRAWS, uniforms, True)
    weights = kept_weights(logits[0], 0.8, 0.85, 0.0)
    shares = np.bincount(columns, minlength=40) / DRAWS
    assert np.abs(shares - weights / weights.sum()).max() < 1.5 / DRAWS
    for uniform, column in zip(uniforms, columns, strict=True):
        assert_drawn_by(weights, uniform, column)


def test_rows_have_numbers_of_their_own() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    rows = [(1.0, 1e-6, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 0.3), (1e-3, 1.0, 0.0)]
    assert drawn(logits, rows, [0.0] * 4, True) == [3, 0, 2, 3]


@pytest.mark.parametrize("top_p", [False, True])
def test_rows_without_a_token_are_told_apart(top_p: bool) -> None:
    logits = torch.zeros(5, CHUNK + 50)
    logits[0] = float("-inf")
    logits[1, CHUNK + 49] = float("nan")
    logits[2, 7] = float("inf")
    logits[3, : CHUNK + 3] = float("-inf")
    logits[3, CHUNK + 4 :] = float("-inf")
    logits[4] = float("nan")
    codes = drawn(logits, [(1.0, 0.9, 0.0)] * 5, [0.999] * 5, top_p)
    assert codes == [NOTHING_ALLOWED, NOT_FINITE, NOT_FINITE, CHUNK + 3, NOT_FINITE]


def test_a_row_draws_the_same_in_any_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 3 * CHUNK).bfloat16()
    uniforms = torch.rand(5).tolist()
    rows = [(0.9, 0.8, 0.0)] * 5
    alone = [drawn(logits[i : i + 1], rows[:1], uniforms[i : i + 1], True)[0] for i in range(5)]
    assert drawn(logits, rows, uniforms, True) == alone


@pytest.mark.skipif(DEVICE.type != "cuda", reason="it takes half a minute in the interpreter")
def test_a_vocabulary_at_the_limit() -> None:
    logits = torch.full((1, nucleus.MAX_COLUMNS), -20.0, dtype=torch.bfloat16)
    logits[0, -1] = 20.0
    assert drawn(logits, [(1.0, 0.9, 0.0)], [0.5], True) == [nucleus.MAX_COLUMNS - 1]
