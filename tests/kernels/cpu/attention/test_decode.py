from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graftlm.kernels.cpu.attention import decode as decode_attention
from graftlm.kernels.cpu.attention.decode import CompiledDecode
from graftlm.kernels.cpu.attention.metadata import DecodeQueries
from graftlm.kernels.cpu.compiled import loop_runtime
from graftlm.kernels.cpu.compiled.openmp import parallel_region
from graftlm.kernels.kv_store import LayerKV, allocate_kv

NUM_ROWS, NUM_KEYS, DIM = 24, 150, 32


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def keys_and_values(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [NUM_ROWS * NUM_KEYS, 2, DIM], and queries [NUM_ROWS, 4, DIM]."""
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(NUM_ROWS * NUM_KEYS, 2, DIM, generator=generator) for _ in range(2))
    return k, v, torch.randn(NUM_ROWS, 4, DIM, generator=generator).to(dtype)


def attend(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of 2 x 2 heads, each over tokens of its own: float32 [NUM_ROWS, 4, DIM]."""
    store = allocate_kv([LayerKV(2, DIM, DIM)], NUM_ROWS * NUM_KEYS, dtype)
    k, v, q = keys_and_values(dtype)
    store.k[0].copy_(k)
    store.v[0].copy_(v)
    queries = DecodeQueries.of([(i, [(i * NUM_KEYS, (i + 1) * NUM_KEYS)]) for i in range(NUM_ROWS)])
    out, lse = torch.empty(NUM_ROWS, 4, DIM), torch.empty(NUM_ROWS, 4)
    decode = CompiledDecode(2, DIM, DIM, dtype, capped=False)
    decode.run(q, None, (store.k[0], store.v[0]), queries, DIM**-0.5, None, out, lse)
    return out


@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(parallel_region() is None, reason="torch is not linked with OpenMP here")
def test_threads_share_the_rows_and_answer_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = attend()
    monkeypatch.setattr(decode_attention, "_SMALL_BYTES", 0)
    together = attend()
    assert torch.equal(together, alone)


@pytest.mark.usefixtures("three_threads")
def test_without_openmp_one_thread_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = attend()
    monkeypatch.setattr(decode_attention, "_SMALL_BYTES", 0)
    monkeypatch.setattr(loop_runtime, "parallel_region", lambda: None)
    assert torch.equal(attend(), alone)


def test_bfloat16_is_widened_exactly_and_rounded_to_the_nearest() -> None:
    """One key has all the weight, so the answer is its value."""
    store = allocate_kv([LayerKV(1, DIM, DIM)], 1, torch.bfloat16)
    values = torch.randn(DIM, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    store.k[0].zero_()
    store.v[0].copy_(values)
    q = torch.zeros(1, 1, DIM, dtype=torch.bfloat16)
    out, lse = torch.empty(1, 1, DIM, dtype=torch.bfloat16), torch.empty(1, 1)
    decode = CompiledDecode(1, DIM, DIM, torch.bfloat16, capped=False)
    decode.run(q, None, (store.k[0], store.v[0]), DecodeQueries.of([(0, [(0, 1)])]), 1.0, None, out, lse)
    assert torch.equal(out[0, 0], values)
    assert lse.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capped", [False, True], ids=["plain", "capped"])
def test_queries_that_go_over_their_keys_together_get_what_each_gets_alone(dtype: torch.dtype, capped: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    store = allocate_kv([LayerKV(2, DIM, DIM)], 400, dtype)
    store.k[0].copy_(torch.randn(store.k[0].shape, generator=generator))
    store.v[0].copy_(torch.randn(store.v[0].shape, generator=generator))
    q = torch.randn(21, 4, DIM, generator=generator).to(dtype)
    scattered = [(200, 264), (10, 74), (300, 305)]
    queries = [(i, [*scattered, (100, 100 + i)] if i else scattered) for i in range(4)]  # the first ends with a span
    queries += [(4, [(0, 30)])]
    queries += [(i, [(64, 124 + i)]) for i in range(5, 21)]  # across the end of a block of keys
    decode = CompiledDecode(2, DIM, DIM, dtype, capped=capped)

    def attended(runs: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty(21, 4, DIM), torch.empty(21, 4)
        reads = DecodeQueries.of(queries, runs)
        decode.run(q, None, (store.k[0], store.v[0]), reads, 0.2, 5.0 if capped else None, out, lse)
        return out, lse

    for together, alone in zip(attended([4, 1, 16]), attended(None), strict=True):
        assert torch.equal(together, alone)
