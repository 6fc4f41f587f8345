"""Copies of KV between a GPU and host memory: what comes back is what was there."""

from __future__ import annotations

import pytest
import torch

from graftlm.core.kv.tiers.block_copier import BUFFERS, BlockCopier, BlockLayout, Run

pytestmark = pytest.mark.gpu
BLOCK = 64


def test_blocks_come_back_from_host_memory_unchanged_while_their_slots_are_written_again() -> None:
    shapes = ((5000, 8, 128), (5000, 8, 128), (5000, 2, 100), (5000, 3))
    kinds = (torch.bfloat16, torch.bfloat16, torch.float32, torch.uint8)
    parts = [torch.randint(0, 100, shape, device="cuda").to(kind) for shape, kind in zip(shapes, kinds, strict=True)]
    before = [part.clone() for part in parts]
    layout = BlockLayout(parts, BLOCK)
    copier = BlockCopier(parts, layout)
    starts = torch.randperm(5000 // BLOCK)[:40].tolist()
    assert len(starts) // 4 > BUFFERS
    for at in range(0, len(starts), 4):
        four = [start * BLOCK for start in starts[at : at + 4]]
        rows = torch.empty(len(four), layout.num_bytes, dtype=torch.uint8).pin_memory().split([1, 2, 1])
        runs = [Run(row, 3 * (row % 2), start, BLOCK - 3 * (row % 2)) for row, start in enumerate(four)]
        saved = copier.save(runs, rows)
        assert saved is not None
        for part in parts:
            for run in runs:
                part[run.start : run.start + run.size] = 0
        saved.synchronize()
        copier.load(runs, rows).order_before(torch.cuda.current_stream())
    copier.synchronize()
    torch.cuda.synchronize()
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
