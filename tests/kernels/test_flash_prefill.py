"""Prefill over ragged sequences: how a step is laid out and merged; without a GPU, over the definition of flash."""

from dataclasses import dataclass

import pytest
import torch

from graftlm.core.pages import Extent
from graftlm.kernels.flash_prefill import flash_prefill, lay_out
from tests.kernels.test_triton_attention import DEVICE, error, reference

HEADS, KV_HEADS, DIM = 4, 2, 64
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
LIMIT = 2e-2 if DEVICE.type == "cuda" else 1e-5


@dataclass
class Row:
    start: int
    num_new: int
    past: int
    extents: tuple[Extent, ...]


@dataclass
class Prefix:
    length: int
    extents: tuple[Extent, ...]
    rows: tuple[int, ...]


def rows_of(*given: tuple[int, int, list[tuple[int, int]]]) -> list[Row]:
    """(new tokens, cached tokens, slots) of each row; three decode rows come before them."""
    rows, start = [], 3
    for num_new, past, extents in given:
        rows.append(Row(start, num_new, past, tuple(Extent(*e) for e in extents)))
        start += num_new
    return rows


def check(rows: list[Row], shared: list[tuple[Prefix, list[int]]], window: int | None = None) -> None:
    """The rows' attention is that of each by itself."""
    torch.manual_seed(0)
    k_store, v_store = (torch.randn(400, KV_HEADS, DIM, device=DEVICE).to(DTYPE) for _ in "kv")
    num_tokens = rows[-1].start + rows[-1].num_new - 3
    q = torch.randn(num_tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    all_slots = [[s for e in row.extents for s in range(e.start, e.stop)] for row in rows]
    new = [s for row, slots in zip(rows, all_slots, strict=True) for s in slots[row.past :]]
    step = lay_out(rows, shared, DEVICE)
    out = flash_prefill(q, k_store[new], v_store[new], k_store, v_store, step, scale=0.1, window=window)
    for row, slots in zip(rows, all_slots, strict=True):
        here = slice(row.start - 3, row.start - 3 + row.num_new)
        positions = torch.arange(row.past, len(slots), device=DEVICE)
        options = {"scale": 0.1, "window": window, "softcap": None, "sinks": None}
        assert error(out[here], reference(q[here], k_store[slots], v_store[slots], positions, **options)) < LIMIT


@pytest.mark.parametrize("window", [None, 6])
def test_cold_rows_read_what_they_just_computed(window: int | None) -> None:
    rows = rows_of((20, 0, [(10, 30)]), (9, 0, [(40, 44), (60, 65)]))
    assert lay_out(rows, [], DEVICE).slots is None
    check(rows, [], window)


def test_rows_with_cached_tokens_read_them_too() -> None:
    check(rows_of((20, 0, [(10, 30)]), (9, 25, [(100, 120), (200, 214)])), [])
    alone = rows_of((9, 25, [(100, 134)]))
    assert lay_out(alone, [], DEVICE).slots == slice(100, 134)
    check(alone, [])


def test_a_prefix_that_rows_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.kernels.flash_prefill.MIN_SHARED_READS", 20)
    common = ((100, 120), (130, 140))
    rows = rows_of((5, 30, [*common, (0, 5)]), (6, 30, [*common, (10, 16)]), (7, 33, [*common, (200, 210)]))
    everyone = Prefix(30, tuple(Extent(*e) for e in common), (0, 1, 2))
    step = lay_out(rows, [(everyone, [0, 1, 2])], DEVICE)
    assert [p.length for p in step.prefixes] == [30] and step.prefixes[0].queries is None
    check(rows, [(everyone, [0, 1, 2])])
    check(rows, [(everyone, [0, 2])])


def test_a_prefix_that_saves_little_is_read_by_each_row() -> None:
    rows = rows_of((5, 30, [(100, 130), (0, 5)]), (6, 30, [(100, 130), (10, 16)]))
    both = Prefix(30, (Extent(100, 130),), (0, 1))
    assert lay_out(rows, [(both, [0, 1])], DEVICE).prefixes == ()
    check(rows, [(both, [0, 1])])
