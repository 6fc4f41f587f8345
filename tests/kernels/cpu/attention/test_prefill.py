from __future__ import annotations

import pytest
import torch

from graftlm.kernels.cpu.attention.backend import attend
from graftlm.kernels.cpu.attention.metadata import QueryBlocks
from graftlm.kernels.cpu.attention.prefill import CompiledPrefill
from graftlm.kernels.cpu.calls import COLUMNS
from graftlm.kernels.cpu.compiled.openmp import parallel_region
from graftlm.kernels.cpu.loops.prefill_attention import KEYS
from graftlm.kernels.kv_store import KVStore, LayerKV

DIM = 32


def run(
    num_queries: int, num_keys: int, group: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last `num_queries` of `num_keys` tokens, over two KV heads: the loop's answer and the definition's."""
    generator = torch.Generator().manual_seed(5)
    store = KVStore([LayerKV(2, DIM, DIM)], num_keys + 7, dtype)
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


def test_bfloat16_is_computed_in_float32() -> None:
    out, expected = run(100, 170, dtype=torch.bfloat16)
    torch.testing.assert_close(out, expected)


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
