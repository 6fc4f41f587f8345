from __future__ import annotations

import math

import pytest
import torch

from graftlm.kernels.cpu.attention.backend import attend
from graftlm.kernels.cpu.attention.metadata import QueryBlocks
from graftlm.kernels.cpu.attention.prefill import CompiledPrefill
from graftlm.kernels.cpu.calls import COLUMNS
from graftlm.kernels.cpu.compiled.openmp import parallel_region
from graftlm.kernels.cpu.loops.prefill_attention import KEYS
from graftlm.kernels.kv_store import LayerKV, allocate_kv

DIM = 32


def run(
    num_queries: int, num_keys: int, group: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `num_queries` of `num_keys` tokens, over two KV heads: the loop's answer and the definition's."""
    generator = torch.Generator().manual_seed(5)
    store = allocate_kv([LayerKV(2, DIM, DIM)], num_keys + 7, dtype)
    store.k[0].copy_(torch.randn(store.k[0].shape, generator=generator))
    store.v[0].copy_(torch.randn(store.v[0].shape, generator=generator))
    q = torch.randn(num_queries, 2 * group, DIM, generator=generator).to(dtype)
    past, block = num_keys - num_queries, COLUMNS // group
    parts = [range(i, min(i + block, num_queries)) for i in range(0, num_queries, block)]
    spans = [(0, num_keys // 3), (num_keys // 3 + 7, num_keys + 7)]  # two extents, with a gap between
    blocks = QueryBlocks.of([(list(part), [past + i + 1 for i in part], spans) for part in parts])
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
    CompiledPrefill(group, DIM, DIM, dtype).run(q, (store.k[0], store.v[0]), blocks, DIM**-0.5, out, lse)

    seen = torch.arange(num_keys)[None] <= torch.arange(past, num_keys)[:, None]
    keys, values = (
        torch.cat([x[first:last].float() for first, last in spans]).repeat_interleave(group, 1).transpose(0, 1)[None]
        for x in (store.k[0], store.v[0])
    )
    expected = attend(q.float().transpose(0, 1)[None], keys, values, scale=DIM**-0.5, mask=seen)
    torch.testing.assert_close(lse, expected.lse[0].transpose(0, 1))
    return out, expected.out[0].transpose(0, 1)


@pytest.mark.parametrize("num_queries", [1, COLUMNS - 1, COLUMNS, 2 * COLUMNS + 5])
@pytest.mark.parametrize("past", [0, 1, KEYS - 1, KEYS, 3 * KEYS + 2])
def test_every_fill_of_a_block_agrees_with_the_definition(num_queries: int, past: int) -> None:
    out, expected = run(num_queries, past + num_queries)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("group", [3, 5, COLUMNS])
def test_groups_that_do_not_divide_a_block_agree_with_the_definition(group: int) -> None:
    out, expected = run(40, 90, group)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("num_queries", [1, 20, 100])
@pytest.mark.parametrize("past", [0, 1, KEYS - 1, 3 * KEYS + 2])
def test_bfloat16_is_summed_in_float32(num_queries: int, past: int) -> None:
    """Where a processor multiplies bfloat16, the softmax is rounded to it too: one part in 512, of values around 1."""
    out, expected = run(num_queries, past + num_queries, dtype=torch.bfloat16)
    error = (out - expected).abs()
    assert error.max() < 2e-2
    assert error.mean() < 1e-3


def test_scores_far_above_earlier_ones_take_over() -> None:
    """Later keys whose scores are larger by far, so that sums are scaled anew, beside columns where they are not."""
    for dtype in (torch.float32, torch.bfloat16):
        store = allocate_kv([LayerKV(1, DIM, DIM)], 4 * KEYS, dtype)
        store.k[0].zero_()
        store.k[0][2 * KEYS :] = 8.0
        store.v[0][: 2 * KEYS], store.v[0][2 * KEYS :] = 1.0, 3.0
        q = torch.zeros(20, 1, DIM, dtype=dtype)
        q[::2] = 1.0
        blocks = QueryBlocks.of([(list(range(20)), [4 * KEYS] * 20, [(0, 4 * KEYS)])])
        out, lse = torch.empty(q.shape), torch.empty(q.shape[:2])
        CompiledPrefill(1, DIM, DIM, dtype).run(q, (store.k[0], store.v[0]), blocks, 1.0, out, lse)
        torch.testing.assert_close(out[::2], torch.full_like(out[::2], 3.0))
        torch.testing.assert_close(out[1::2], torch.full_like(out[1::2], 2.0))
        torch.testing.assert_close(lse[::2], torch.full_like(lse[::2], 8.0 * DIM + math.log(2 * KEYS)))
        torch.testing.assert_close(lse[1::2], torch.full_like(lse[1::2], math.log(4 * KEYS)))


@pytest.mark.skipif(parallel_region() is None, reason="torch is not linked with OpenMP here")
def test_threads_share_the_blocks_and_answer_as_one_does() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone, _ = run(300, 400)
        torch.set_num_threads(3)
        together, _ = run(300, 400)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
