from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from graftlm.kernels.attention import LayerSpec
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention import backend as attention
from graftlm.kernels.cpu.attention.backend import Partial, TorchAttention, attend, merge
from graftlm.kernels.cpu.attention.metadata import build_metadata, spans_of
from graftlm.kernels.kv_store import KVStore, LayerKV, allocate_kv
from graftlm.kernels.wire_plan import Extent, Row, SharedPrefix, WirePlan, slots_of


def make_plan(pieces: Sequence[tuple[int, int, tuple[Extent, ...]]], shared: tuple[SharedPrefix, ...] = ()) -> WirePlan:
    """A plan of rows (past, num_new, extents)."""
    rows: list[Row] = []
    start = 0
    for past, num_new, extents in pieces:
        rows.append(Row(start, num_new, past, extents))
        start += num_new
    return WirePlan.of(rows, [0] * start, [], shared)


def reference(
    q: torch.Tensor,
    store: KVStore,
    plan: WirePlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, one query and head at a time, in float64."""
    keys, values = store.k[0].double(), store.v[0].double()
    num_heads, num_kv_heads = q.shape[1], keys.shape[1]
    out = torch.zeros(q.shape[0], num_heads, values.shape[-1], dtype=torch.float64)
    for row in plan.rows:
        slots = torch.from_numpy(slots_of(row.extents, 0, row.kv_len))
        for i in range(row.num_new):
            last = row.past + i + 1
            until = plan.sees(window)
            end = last if until is None else int(until[row.start + i])
            seen = slots[0 if window is None else max(last - window, 0) : end]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = keys[seen, kv_head] @ q[row.start + i, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[None]])
                weights = scores.softmax(0)[: len(seen)]
                out[row.start + i, head] = weights @ values[seen, kv_head]
    return out


def check(
    plan: WirePlan,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    dim: int = 16,
    v_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-6,  # float32 sums over some hundred products
) -> None:
    """Run the kernel on random tokens, decode rows compiled and not, and compare it with the definition."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_tokens = len(plan.out_slots)
    q, k = random(num_tokens, num_heads, dim), random(num_tokens, num_kv_heads, dim)
    v = random(num_tokens, num_kv_heads, v_dim or dim)
    past = random(640, num_kv_heads, dim), random(640, num_kv_heads, v_dim or dim)
    options = {
        "scale": dim**-0.5,
        "window": window,
        "softcap": softcap,
        "sinks": random(num_heads) if sinks else None,
    }
    for compiled in (True, False):
        store = allocate_kv([LayerKV(num_kv_heads, dim, v_dim or dim)], 640, dtype)
        store.k[0].copy_(past[0])
        store.v[0].copy_(past[1])
        kernel = TorchAttention(store, compiled=compiled)
        kernel.prepare(plan)
        out = kernel.forward(0, q, k, v, plan, AttentionParams(**options))
        assert torch.equal(store.k[0][plan.out_slots], k)
        assert torch.equal(store.v[0][plan.out_slots], v)
        expected = reference(q, store, plan, **options)
        assert out.dtype == dtype
        assert out.shape == expected.shape
        assert float((out.double() - expected).norm() / expected.norm()) < tolerance
        tokens = torch.arange(num_tokens - 1, 0, -23)
        store.k[0][plan.out_slots] = float("nan")
        some = kernel.forward_some(0, q, k, v, plan, AttentionParams(**options), tokens)
        assert float((some.double() - expected[tokens]).norm() / expected[tokens].norm()) < tolerance


DECODE = make_plan([(20, 1, (Extent(0, 21),)), (3, 1, (Extent(30, 34),)), (0, 1, (Extent(40, 41),))])
CHUNK = make_plan([(0, 17, (Extent(5, 22),))])
EXTEND = make_plan([(9, 12, (Extent(50, 60), Extent(3, 14)))])
EXTEND_LONG = make_plan([(21, 40, (Extent(50, 60), Extent(3, 14), Extent(100, 140)))])
EXTEND_SHORT = make_plan([(30, 5, (Extent(200, 235),)), (280, 2, (Extent(300, 582),))])
MIXED = make_plan(
    [
        (40, 1, (Extent(0, 20), Extent(30, 51))),
        (0, 9, (Extent(60, 69),)),
        (14, 1, (Extent(70, 85),)),
        (11, 6, (Extent(90, 95), Extent(100, 112))),
        (2, 1, (Extent(120, 121), Extent(130, 131), Extent(140, 141))),
    ]
)
LONG = make_plan([(400, 1, (Extent(0, 401),)), (3, 1, (Extent(410, 414),)), (200, 1, (Extent(420, 621),))])
PREFIX = (Extent(0, 40), Extent(100, 124))
SHARED = make_plan(
    [
        (70, 1, (*PREFIX, Extent(200, 207))),
        (64, 1, (*PREFIX, Extent(210, 211))),
        (8, 1, (Extent(220, 229),)),
        (80, 3, (*PREFIX, Extent(230, 249))),
    ],
    (SharedPrefix(64, (0, 1, 3)),),
)
PLANS = {
    "decode": DECODE,
    "chunk": CHUNK,
    "extend": EXTEND,
    "extend long": EXTEND_LONG,
    "extend short": EXTEND_SHORT,
    "mixed": MIXED,
    "long": LONG,
    "shared": SHARED,
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_each_kind_of_step_agrees_with_the_definition(plan: WirePlan) -> None:
    check(plan)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_head_size_agrees_with_the_definition(dim: int) -> None:
    check(MIXED, dim=dim)


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_every_group_of_query_heads_agrees_with_the_definition(group: int) -> None:
    check(SHARED, num_heads=2 * group, num_kv_heads=2)
    check(MIXED, num_heads=2 * group, num_kv_heads=2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("window", [1, 7, 32, 1000])
def test_a_window_hides_what_lies_before_it(plan: WirePlan, window: int) -> None:
    check(plan, window=window)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("window", [None, 7])
def test_softcap_and_sinks_agree_with_the_definition(plan: WirePlan, window: int | None) -> None:
    check(plan, softcap=2.0, window=window)
    check(plan, sinks=True, window=window)
    check(plan, softcap=2.0, sinks=True, window=window)


@pytest.mark.parametrize("windowed_only", [False, True])
@pytest.mark.parametrize("window", [None, 9, 64])
def test_tokens_may_see_to_the_end_of_their_span(window: int | None, windowed_only: bool) -> None:
    plan = make_plan([(0, 1, (Extent(0, 1),)), (3, 3, (Extent(1, 7),)), (5, 30, (Extent(7, 20), Extent(30, 52)))])
    until = np.array([1, 6, 6, 6, *range(6, 10), *[22] * 13, *range(23, 27), *[35] * 9])
    check(replace(plan, until=until, until_windowed=windowed_only), window=window)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_values_may_be_of_another_size_than_keys(plan: WirePlan) -> None:
    check(plan, dim=24, v_dim=16)
    check(plan, dim=24, v_dim=16, window=7)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_bfloat16_is_off_by_its_rounding_only(plan: WirePlan) -> None:
    check(plan, dim=64, dtype=torch.bfloat16, tolerance=8e-3)  # bfloat16 rounds to 1 in 256


TILED = make_plan([(0, 130, (Extent(0, 130),)), (256, 129, (Extent(140, 396), Extent(400, 529)))])
SHARED_TILED = make_plan(
    [(256, 70, (Extent(0, 256), Extent(260, 330))), (256, 60, (Extent(0, 256), Extent(340, 400)))],
    (SharedPrefix(256, (0, 1)),),
)


@pytest.mark.parametrize(("plan", "num_calls"), [(TILED, 3), (SHARED_TILED, 2), (EXTEND_LONG, 0)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1)])
def test_long_chunks_in_bfloat16_are_read_in_tiles_and_agree_with_the_definition(
    plan: WirePlan, num_calls: int, num_heads: int, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 4,000 tokens took twice as long. `check` runs a step with a shared prefix twice."""
    calls = []
    monkeypatch.setattr(attention, "HAS_TILES", True)
    monkeypatch.setattr(attention, "attend", lambda *a, **options: calls.append(a) or attend(*a, **options))
    check(plan, num_heads=num_heads, num_kv_heads=num_kv_heads, dim=64, dtype=torch.bfloat16, tolerance=8e-3)
    in_torch = len(calls)
    calls.clear()
    monkeypatch.setattr(attention, "HAS_TILES", False)
    check(plan, num_heads=num_heads, num_kv_heads=num_kv_heads, dim=64, dtype=torch.bfloat16, tolerance=8e-3)
    assert in_torch - len(calls) == num_calls


@pytest.mark.parametrize(("dtype", "v_dim"), [(torch.float32, 64), (torch.bfloat16, 32)])
def test_float32_and_values_of_another_size_are_never_read_in_tiles(
    dtype: torch.dtype, v_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "HAS_TILES", True)
    assert not attention.CompiledLoops.of(2, 64, v_dim, False, dtype=dtype).has_tiles
    assert attention.CompiledLoops.of(2, 64, 64, False, dtype=torch.bfloat16).has_tiles


@pytest.mark.parametrize(
    ("past", "num_new", "spans", "in_tiles"),
    [(0, 127, 1, False), (0, 128, 1, True), (991, 32, 1, False), (992, 32, 1, True), (992, 31, 1, False)]
    + [(2048, 128, 8, True), (2040, 128, 8, False), (4096, 32, 8, True), (4088, 32, 8, False)],
)
def test_the_length_of_a_chunk_and_of_the_spans_before_it_decide_whether_tiles_are_used(
    past: int, num_new: int, spans: int, in_tiles: bool
) -> None:
    each = past // spans
    before = [Extent(i * (each + 1), i * (each + 1) + each) for i in range(spans)]
    plan = make_plan([(past, num_new, (*before, Extent(5000, 5000 + num_new)))])
    found = build_metadata(plan, None, 16, torch.device("cpu"), has_tiles=True)
    assert (bool(found.chunks), found.blocks is None) == (in_tiles, in_tiles)
    assert build_metadata(plan, None, 16, torch.device("cpu")).chunks == []


def test_without_the_private_flash_operator_the_matrix_products_answer_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_flash", None)
    for plan in PLANS.values():
        check(plan)
        check(plan, window=7)


def test_a_windowed_chunk_longer_than_a_block_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 5)
    check(make_plan([(9, 23, (Extent(50, 60), Extent(3, 25)))]), window=6)


def test_merged_halves_are_the_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for n in (3, 10, 10))
    whole = attend(q, k, v, scale=0.5)
    halves = merge(
        attend(q, k[:, :, :4], v[:, :, :4], scale=0.5),
        Partial(*attend(q, k[:, :, 4:], v[:, :, 4:], scale=0.5)),
    )
    torch.testing.assert_close(halves.out, whole.out)
    torch.testing.assert_close(halves.lse, whole.lse)


def test_spans_are_the_slots_of_a_run_of_tokens() -> None:
    extents = (Extent(10, 13), Extent(50, 52), Extent(7, 9))
    assert spans_of(extents, 0, 7) == [(10, 13), (50, 52), (7, 9)]
    assert spans_of(extents, 2, 4) == [(12, 13), (50, 51)]
    assert spans_of(extents, 3, 3) == []


def test_query_heads_must_be_a_multiple_of_kv_heads() -> None:
    kernel = TorchAttention(allocate_kv([], 0, torch.float32))
    assert kernel.supports(LayerSpec(6, 3, 8, 8)) is None
    assert kernel.supports(LayerSpec(6, 4, 8, 8)) == "6 query heads are no multiple of 4 KV heads"
