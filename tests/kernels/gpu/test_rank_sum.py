"""Sums over ranks with the norm after them: two ranks in one process, which take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.kernels.norm import Norm

SIZE = 2


@pytest.fixture
def rank_sum(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    import triton.language as tl

    from graftlm.kernels.gpu import rank_sum

    monkeypatch.setattr(rank_sum, "LOOKS", tl.constexpr(1))  # a rank that is alone gives up at once
    return rank_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_their_own_flags_are_added_alike_on_all_ranks(dtype: torch.dtype, rank_sum: Any) -> None:
    """Seven sums of other numbers of rows, so that each place is used again, with zeros that have a sign."""
    slab_bytes, n, cpu = 1 << 12, 64, torch.device("cpu")
    of = rank_sum.RankSum
    memory = [torch.empty(of.num_bytes(slab_bytes, SIZE) // 4, dtype=torch.int32) for _ in range(SIZE)]
    aborts = [torch.zeros(1, dtype=torch.int32) for _ in range(SIZE)]
    for each in memory:
        of.clear(each, SIZE)
    bases = [each.data_ptr() for each in memory]
    first, second = (of(rank, bases, aborts[rank].data_ptr(), slab_bytes, cpu) for rank in range(SIZE))
    generator = torch.Generator().manual_seed(1)
    for number, rows in enumerate((3, 1, 2, 4, 4, 1, 3)):
        parts = torch.randn(SIZE, 2, rows, n, generator=generator)
        parts[:, :, 0, :5] = -0.0
        before = torch.randn(rows, n, generator=generator).to(dtype)
        norm = Norm(torch.rand(n, generator=generator).to(dtype), 1e-5) if number % 3 else None
        counters = first._row_counters.clone()
        aborts[0][0] = 1
        first.add_norm(parts[0], before.clone(), norm)  # its rows are sent, those of the other are not there
        ones, others = before.clone(), before.clone()
        other = second.add_norm(parts[1], others, norm)
        aborts[0][0] = 0
        first._row_counters.copy_(counters)
        one = first.add_norm(parts[0], ones, norm)
        assert torch.equal(ones, others) and torch.equal(one, other)
        expected = before.float() + parts.float().sum((0, 1))
        assert torch.allclose(ones.float(), expected, atol=1e-5 if dtype is torch.float32 else 0.1)
        if norm is not None:
            assert torch.allclose(one.float(), norm(ones).float(), atol=1e-5 if dtype is torch.float32 else 0.1)
