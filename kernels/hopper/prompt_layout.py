"""Where rows that read prompts find their keys and values laid out densely, and how their queries are cut.

A row's own tokens, the cached ones and then those of the step, lie one after the other, from a multiple of BLOCK on; a
prefix that several rows share lies there once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import WirePlan

MIN_TOKENS = 1280
"""New tokens of a step that is laid out: for so many a card takes longer than the host for one more launch a layer."""

BLOCK = 128
"""Tokens of a block, which is laid out and attended to in one go."""

QUERIES = 128
"""Queries of a tile: those of a KV head's query heads, of consecutive tokens."""

FIELDS = 8
"""Numbers for each block and each tile, the last two unused."""


def padded(group: int) -> int:
    """For how many query heads of a KV head a tile has room, where there are `group`: a power of two."""
    return 1 << (group - 1).bit_length()


@dataclass
class PromptLayout:
    """Rows of a step, the last ones.

    first_token where their new tokens begin in the step
    num_tokens  tokens that are laid out, up to whole blocks
    num_pairs   how many times a query of a head sees a token
    longest     the most tokens of a row
    dense       whether the step's own K and V are laid out already: of one row, without cached tokens
    blocks      int32 [num_blocks, FIELDS]: row of the step; which of its tokens is the first of its stretch; where in
                that stretch the block begins; cached tokens of the stretch, then tokens of the step, and the first of
                those in the step. Blocks lie in this order.
    """

    first_token: int
    num_tokens: int
    num_pairs: int
    longest: int
    dense: bool
    blocks: torch.Tensor
    _rows: np.ndarray  # int64 [6, num_rows]: of each row what its tiles have, in the order of `tiles`
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    def filled(self, group: int) -> float:
        """The part of the tiles that is of some token, where `group` query heads share a KV head."""
        new, each = self._rows[1], QUERIES // padded(group)
        return float(new.sum() / (each * (-(-new // each)).sum()))

    def tiles(self, group: int) -> torch.Tensor:
        """Tiles of QUERIES queries where `group` query heads share a KV head; the longest first.

        -> int32 [num_tiles, FIELDS], on the device: first token in the step; tokens; where the shared prefix begins as
           it is laid out, its length; where the row's own tokens begin; own tokens before the tile's first one
        """
        if group not in self._tiles:
            start, new, shared, shared_len, own, cached = self._rows
            each = QUERIES // padded(group)
            counts = -(-new // each)
            row = np.repeat(np.arange(len(new)), counts)
            token = each * _within(counts)
            tiles = np.zeros((len(row), FIELDS), np.int32)
            tiles[:, 0], tiles[:, 1] = start[row] + token, np.minimum(new[row] - token, each)
            tiles[:, 2], tiles[:, 3] = shared[row], shared_len[row]
            tiles[:, 4], tiles[:, 5] = own[row], cached[row] + token
            order = np.argsort(-(tiles[:, 3] + tiles[:, 5]), kind="stable")
            self._tiles[group] = send(tiles[order], self.blocks.device)
        return self._tiles[group]


def prompt_layout(plan: WirePlan, first_row: int, device: torch.device) -> PromptLayout:
    """Lay out rows [first_row, ...) of a step."""
    new, past = plan.num_new[first_row:], plan.past[first_row:]
    start = plan.ends[first_row:] - new
    shared_len = np.zeros_like(past)
    prefix = np.full_like(past, -1)
    stretches: list[tuple[int, int, int, int, int]] = []
    for found in plan.shared:
        members = [r - first_row for r in found.rows if r >= first_row and plan.past[r] >= found.length]
        if len(members) > 1:
            shared_len[members], prefix[members] = found.length, len(stretches)
            stretches.append((first_row + members[0], 0, found.length, 0, 0))
    num_shared, cached = len(stretches), past - shared_len
    own = zip(range(first_row, plan.num_rows), *(x.tolist() for x in (shared_len, cached, new, start)), strict=True)
    array = np.array([*stretches, *own], np.int64)
    counts = -(-(array[:, 2] + array[:, 3]) // BLOCK)
    begins = BLOCK * (np.cumsum(counts) - counts)
    blocks = np.zeros((int(counts.sum()), FIELDS), np.int32)
    blocks[:, [0, 1, 3, 4, 5]] = np.repeat(array, counts, axis=0)
    blocks[:, 2] = BLOCK * _within(counts)
    return PromptLayout(
        first_token=int(start[0]),
        num_tokens=BLOCK * len(blocks),
        num_pairs=int((new * (2 * past + new + 1) // 2).sum()),
        longest=int((past + new).max()),
        dense=len(new) == 1 and not past.any(),
        blocks=send(blocks, device),
        _rows=np.stack([start, new, np.where(prefix >= 0, begins[prefix], 0), shared_len, begins[num_shared:], cached]),
    )


def _within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return within
