"""Tokens of all layers are copied between slots and rows of bytes by one kernel, and come back unchanged."""

from __future__ import annotations

import torch

from graftlm.core.kv.tiers.block_copier import BlockLayout
from graftlm.kernels.gpu.block_rows import BlockRows

BLOCK = 4


def test_tokens_go_to_rows_and_back_and_odd_parts_are_left() -> None:
    shapes = ((20, 2, 8), (20, 2, 8), (20, 1, 12), (20, 3))
    kinds = (torch.bfloat16, torch.bfloat16, torch.float32, torch.uint8)
    parts = [torch.randint(0, 100, shape).to(kind) for shape, kind in zip(shapes, kinds, strict=True)]
    parts.append(torch.randint(0, 100, (2, 20, 8)).to(torch.bfloat16).transpose(0, 1))  # a token lies in two places
    layout = BlockLayout(parts, BLOCK)
    copies = BlockRows(parts, layout.offsets)
    assert copies.left == [3, 4]

    rows = torch.zeros(3, layout.num_bytes, dtype=torch.uint8)
    tokens = torch.tensor([[7, 0, 19, 3], [0, 3, 1, 2], [2, 0, 1, 2]])
    copies.gather(tokens, rows)
    for part, view in list(zip(parts, layout.views(rows), strict=True))[:3]:
        for slot, token, row in tokens.T.tolist():
            assert torch.equal(view[row, token], part[slot].view(view.dtype))
        assert not view[1, 0].any()  # not named

    before = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    copies.scatter(tokens, rows)
    for i in range(3):
        assert torch.equal(parts[i][tokens[0]], before[i][tokens[0]])
        assert not parts[i][1].any()
