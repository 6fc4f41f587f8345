"""Attention over keys and values in int8: what is kept, and what it gives, compiled and not."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention.int8 import Int8Attention, SeenSlots
from graftlm.kernels.kv_store import Int8KV, LayerKV, PlainKV, quantize, token_bytes
from graftlm.kernels.wire_plan import Extent, SharedPrefix, WirePlan
from tests.kernels.cpu.attention.test_backend import CHUNK, DECODE, EXTEND, make_plan, reference

SLOTS, HEADS, KV_HEADS, DIM = 640, 4, 2, 32
FEW = make_plan([(9, 3, (Extent(50, 60), Extent(3, 5)))])
PREFIX = (Extent(100, 130),)
SHARED = make_plan(
    [(31, 1, (*PREFIX, Extent(200, 202))), (32, 20, (*PREFIX, Extent(300, 322)))], (SharedPrefix(30, (0, 1)),)
)
PLANS = {"decode": DECODE, "chunk": CHUNK, "extend": EXTEND, "few": FEW, "shared": SHARED}


def widened(store: Int8KV) -> PlainKV:
    """A store in float32 of what one in int8 holds."""
    plain = PlainKV(store.layout, SLOTS, torch.float32)
    plain.k[0].copy_(store.k[0] * store.token_scales[0][0][..., None])
    plain.v[0].copy_(store.v[0] * store.token_scales[0][1][..., None])
    return plain


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_queries_see_the_rounded_keys_and_values(
    plan: WirePlan, options: dict[str, object], dtype: torch.dtype, compiled: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    store = Int8KV([LayerKV(KV_HEADS, DIM, DIM)], SLOTS)
    exact = PlainKV(store.layout, SLOTS, torch.float32)
    for held, scales, plain in zip(
        (store.k[0], store.v[0]), store.token_scales[0], (exact.k[0], exact.v[0]), strict=True
    ):
        plain.copy_(random(SLOTS, KV_HEADS, DIM))
        whole, scale = quantize(plain)
        held.copy_(whole)
        scales.copy_(scale)
    num_tokens = len(plan.out_slots)
    q, k, v = (random(num_tokens, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    given = options | ({"sinks": random(HEADS).to(dtype)} if "sinks" in options else {})
    attention = Int8Attention(store, compiled=compiled)
    out = attention.forward(0, q, k, v, plan, AttentionParams(DIM**-0.5, **given))  # type: ignore[arg-type]
    tolerance = 3e-6 if dtype is torch.float32 else 6e-3  # of the arithmetic alone
    assert out.dtype is dtype
    assert difference(out, reference(q, widened(store), plan, DIM**-0.5, **given)) < tolerance  # type: ignore[arg-type]
    exact.k[0][plan.out_slots], exact.v[0][plan.out_slots] = k.float(), v.float()
    assert difference(out, reference(q, exact, plan, DIM**-0.5, **given)) < 0.015  # type: ignore[arg-type]
    tokens = torch.arange(num_tokens - 1, 0, -5)
    some = attention.forward_some(0, q, k, v, plan, AttentionParams(DIM**-0.5, **given), tokens)  # type: ignore[arg-type]
    if len(tokens):
        assert difference(some, out[tokens].double()) < tolerance


def test_a_rounded_number_is_off_by_half_a_scale_at_most_and_zeros_stay_zeros() -> None:
    x = torch.randn(50, 3, DIM) * torch.logspace(-9, 9, 50)[:, None, None]
    x[7, 1] = 0.0
    whole, scale = quantize(x)
    assert bool(((whole * scale[..., None] - x).abs() <= scale[..., None] * 0.5001).all())
    assert not whole[7, 1].any() and int(whole.abs().max()) == 127


def test_the_compiled_loop_keeps_what_torch_keeps() -> None:
    kept = []
    for compiled in (True, False):
        torch.manual_seed(1)
        store = Int8KV([LayerKV(KV_HEADS, DIM, DIM)], SLOTS)
        for x in (store.k[0], store.v[0], *store.token_scales[0]):
            x.zero_()
        q, k, v = torch.randn(3, HEADS, DIM), torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
        Int8Attention(store, compiled=compiled).forward(0, q, k, v, DECODE, AttentionParams(0.2))
        kept.append((store.k[0], store.v[0], *store.token_scales[0]))
    for mine, theirs in zip(*kept, strict=True):
        assert float((mine.float() - theirs.float()).abs().max()) <= (1 if mine.dtype is torch.int8 else 1e-6)
        assert float((mine != theirs).float().mean()) < 0.01


def test_the_slots_that_are_seen_keep_their_order_without_gaps() -> None:
    seen = SeenSlots(EXTEND)  # slots 50 to 59, then 3 to 13
    assert seen.spans == [(3, 14), (50, 60)] and seen.num_slots == 21
    assert seen.plan.rows[0].extents == [(11, 21), (0, 11)]
    assert seen.plan.out_slots.tolist() == [20, *range(11)]


def test_a_token_takes_half_of_what_it_takes_in_bfloat16() -> None:
    layer = LayerKV(8, 64, 64)
    assert token_bytes(layer, torch.int8) == 8 * (64 + 64 + 8)
    assert token_bytes(layer, torch.bfloat16) / token_bytes(layer, torch.int8) > 1.88
    assert token_bytes(layer, torch.float32) / token_bytes(layer, torch.int8) > 3.76
