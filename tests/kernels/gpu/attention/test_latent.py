"""Latent attention on GPUs; without one the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.decode import DecodeRows, Workspace
from graftlm.kernels.gpu.attention.latent import (
    ExpandedRow,
    LatentTile,
    attend_expanded,
    latent_decode,
    latent_splits,
    tile_of,
)
from graftlm.kernels.gpu.attention.split_kv import uniform_parts
from graftlm.kernels.latent import LatentHeads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANK, ROPE, SCALE = 24, 8, 0.3


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("num_heads", [5, 20])
def test_every_row_sees_its_latents(num_heads: int, splits: int) -> None:
    torch.manual_seed(0)
    lens = torch.tensor([1, 50, 33], dtype=torch.int32, device=DEVICE)
    latents = torch.randn(200, 1, RANK + ROPE, device=DEVICE)
    table = torch.randperm(200, device=DEVICE).int()[:150].view(3, 50)
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    q = torch.randn(3, num_heads, RANK + ROPE, device=DEVICE)
    workspace = Workspace.allocate(3, num_heads, RANK, max(splits, 2), DEVICE)
    step = DecodeRows(table, rows, lens, torch.zeros_like(lens), uniform_parts(3, splits, DEVICE))
    tile = LatentTile(16, 16, 4, 1)
    found = latent_decode(q, latents, step, workspace, SCALE, RANK, tile=tile)
    for row, (at, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        keys = latents[table[at, :length].long(), 0]
        expected = (SCALE * q[row] @ keys.T).softmax(-1) @ keys[:, :RANK]
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)
    assert not workspace.counters.any()


def test_expanded_and_absorbed_attention_agree() -> None:
    torch.manual_seed(0)
    heads = LatentHeads(torch.randn(4, 6, RANK, device=DEVICE), torch.randn(4, 10, RANK, device=DEVICE), ROPE)
    latents, q = torch.randn(40, 1, RANK + ROPE, device=DEVICE), torch.randn(9, 4, 6 + ROPE, device=DEVICE)
    row = ExpandedRow(0, 9, 7, [[30, 35], [3, 20]])  # 16 tokens
    found = attend_expanded(heads, q, latents, row, AttentionParams(SCALE))
    keys = torch.cat([latents[30:35, 0], latents[3:14, 0]])
    scores = SCALE * torch.einsum("thd,nd->htn", heads.absorb(q), keys)
    scores = scores.masked_fill(torch.arange(16, device=DEVICE) > torch.arange(7, 16, device=DEVICE)[:, None], -1e30)
    expected = heads.project((scores.softmax(-1) @ keys[:, :RANK]).transpose(0, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tiles_hold_all_heads_of_small_models() -> None:
    assert tile_of(torch.bfloat16, 16).heads == 16
    assert tile_of(torch.bfloat16, 128).heads == 64


def test_few_rows_are_cut_so_that_all_multiprocessors_have_work() -> None:
    assert [latent_splits(rows, 132) for rows in (1, 48, 128, 192, 512)] == [32, 5, 2, 1, 1]
