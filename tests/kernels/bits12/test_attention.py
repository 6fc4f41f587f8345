"""Attention over a compact store, whichever kernels a step's rows go through."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.bits12.kv_codec import pack, unpack
from graftlm.kernels.gpu.attention.backend import TritonAttention
from graftlm.kernels.kv_store import CompactKV, LayerKV
from tests.kernels.gpu.attention.test_attention import DEVICE, error, plan_of, reference

HEADS, KV_HEADS = 4, 2
# the interpreter has no products in bfloat16: there numbers that it holds are kept in float32
DTYPE, TOLERANCE = (torch.bfloat16, 1e-2) if DEVICE.type == "cuda" else (torch.float32, 1e-4)


def numbers(num_tokens: int, num_heads: int, dim: int) -> torch.Tensor:
    """bfloat16 [num_tokens, num_heads, dim]: one number of a vector may be large, one vector all zero."""
    x = torch.randn(num_tokens, num_heads, dim, device=DEVICE)
    x[:, :, 7] *= 20
    x[0, 0] = 0
    return x.bfloat16()


@pytest.mark.parametrize(
    ("rows", "dim"),
    [
        (((1, 70), (1, 5), (9, 40), (6, 0)), 128),  # decode, a chunk behind cached tokens, a prompt
        (((1, 70), (1, 5), (9, 40), (6, 0)), 256),
        (((1, 70), (1, 5), (9, 40), (6, 0)), 64),
        (((1, 70), (1, 0), (1, 33)), 128),
        (((5, 0), (40, 0)), 128),
        (((1, 16), (12, 0)), 128),
    ],
)
def test_every_row_attends_to_cached_tokens_as_kept_and_to_its_own(rows: tuple[tuple[int, int], ...], dim: int) -> None:
    torch.manual_seed(0)
    plan = plan_of(*rows)
    store = CompactKV([LayerKV(KV_HEADS, dim, dim)], 200, DEVICE)
    store.append(0, torch.arange(200, device=DEVICE), *(numbers(200, KV_HEADS, dim) for _ in "kv"))
    q, k, v = (numbers(plan.num_tokens, heads, dim).to(DTYPE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attention = TritonAttention(store)
    attention.prepare(plan)
    out = attention.forward(0, q, k, v, plan, AttentionParams(0.05))
    kept = [unpack(held, store.exponents[0][:, :, i].T) for i, held in enumerate((store.k[0], store.v[0]))]
    slots = torch.from_numpy(plan.out_slots).to(DEVICE)
    for new, held in zip((k, v), kept, strict=True):
        assert torch.equal(held[slots], unpack(*pack(new.bfloat16())))
    for row in plan.rows:
        here, cached = slice(row.start, row.start + row.num_new), slice(*row.extents[0])
        seen = [
            torch.cat([held[cached][: row.past], new[here].float()]) for held, new in zip(kept, (k, v), strict=True)
        ]
        positions = torch.arange(row.past, row.kv_len, device=DEVICE)
        expected = reference(q[here], *seen, positions, scale=0.05)
        assert error(out[here], expected) < TOLERANCE
