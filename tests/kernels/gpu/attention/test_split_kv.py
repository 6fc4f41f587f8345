"""How decode rows are cut into parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.decode import DecodeRows, Workspace, decode_attention
from graftlm.kernels.gpu.attention.split_kv import EMPTY, PARTS, Parts, cut, max_parts, num_items, uniform_parts
from tests.kernels.gpu.attention.test_attention import DEVICE, TOLERANCE, Case, error, reference


def parts_of(lens: list[int], splits: int) -> tuple[np.ndarray, np.ndarray]:
    items = np.full(num_items(len(lens), splits), -1, np.int32)
    counts = np.full(len(lens), -1, np.int32)
    cut(np.array(lens, np.int32), splits, items, counts)
    return items, counts


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=300), st.sampled_from([1, 2, 4, 16]))
def test_every_part_of_every_row_has_one_program(lens: list[int], splits: int) -> None:
    items, counts = parts_of(lens, splits)
    assert counts.min() >= 1 and counts.max() <= max_parts(len(lens), splits)
    work = items[items != EMPTY]
    assert sorted(work) == sorted(row * PARTS + part for row, count in enumerate(counts) for part in range(count))
    assert (items[len(work) :] == EMPTY).all()


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_rows_of_about_one_length_are_cut_alike(splits: int) -> None:
    _, counts = parts_of([510 + i % 5 for i in range(64)], splits)
    assert set(counts) == {splits}


def test_a_long_row_is_cut_into_parts_of_about_the_mean() -> None:
    _, counts = parts_of([400] * 60 + [6_000], 1)
    assert set(counts[:60]) == {1} and 6_000 / counts[60] < 2 * 500
    _, counts = parts_of([100, 4_000], 8)
    assert counts[0] == 1 and counts[1] == 16


def test_the_longest_rows_begin_first() -> None:
    items, _ = parts_of([10, 500, 40], 1)
    assert [item // PARTS for item in items if item != EMPTY][0] == 1


def test_a_step_of_uniform_parts_has_them_in_the_order_of_the_rows() -> None:
    parts = uniform_parts(3, 2, torch.device("cpu"))
    assert parts.items.tolist() == [0, 64, 128, 1, 65, 129] and parts.counts.tolist() == [2, 2, 2]


@pytest.mark.parametrize("window", [None, 40])
def test_rows_of_any_lengths_attend_by_their_parts(window: int | None) -> None:
    dtype = torch.float32
    case = Case([1, 300, 33, 64], 4, 2, 64, 64, dtype)
    q, params = case.queries(4), AttentionParams(0.1, window=window)
    items, counts = parts_of(case.lens, 1)
    assert counts.max() > 1 and EMPTY in items
    parts = Parts(torch.from_numpy(items).to(DEVICE), torch.from_numpy(counts).to(DEVICE), max_parts(4, 1))
    workspace = Workspace.allocate(4, 4, 64, parts.most, DEVICE)
    workspace.out.fill_(float("nan"))
    step = DecodeRows(case.table, case.rows, case.ints(case.lens), case.ints([0] * 4), parts)
    out = torch.full_like(q, float("nan"))
    decode_attention(q, case.k, case.v, step, workspace, params, splits=1, out=out)
    assert not workspace.counters.any()
    for i, length in enumerate(case.lens):
        last = torch.tensor([length - 1], device=DEVICE)
        expected = reference(q[i : i + 1], *case.kv(i), last, scale=0.1, window=window)
        assert error(out[i : i + 1], expected) < TOLERANCE[dtype]
