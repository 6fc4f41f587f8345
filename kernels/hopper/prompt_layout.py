"""The dense layout of the keys and values of rows that read prompts, and the tiles of their queries.

A row's own tokens, the cached tokens and then the step's, are consecutive from a multiple of BLOCK on; a prefix that
several rows share exists once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import WirePlan

MIN_TOKENS = 1280
"""The least number of new tokens of a gathered step: with fewer, the host is slower than the card at one more launch a
layer."""

BLOCK = 128
"""Tokens of a block, the unit of gathering and of attention."""

QUERIES = 128
"""Queries of a tile: all query heads of a KV head, of consecutive tokens."""

FIELDS = 8
"""Numbers of each block and each tile, the last two unused."""


def padded(group: int) -> int:
    """Return the query heads of a KV head in a tile: `group` rounded up to a power of two."""
    return 1 << (group - 1).bit_length()


@dataclass
class PromptLayout:
    """The layout of the last rows of a step.

    first_token index in the step of the rows' first new token
    num_tokens  gathered tokens, rounded up to whole blocks
    num_pairs   number of pairs of a query of a head and a visible token
    longest     the most tokens of a row
    dense       whether the step's own K and V are the layout already: one row, without cached tokens
    blocks      int32 [num_blocks, FIELDS]: row of the step; the row's token that begins the stretch; offset of the
                block in the stretch; cached tokens of the stretch, then tokens of the step, and the first of these in
                the step. Blocks are in memory order.
    """

    first_token: int
    num_tokens: int
    num_pairs: int
    longest: int
    dense: bool
    blocks: torch.Tensor
    _rows: np.ndarray  # int64 [6, num_rows]: the fields of each row's tiles, in the order of `tiles`
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    def filled(self, group: int) -> float:
        """Return the filled share of the tiles, where `group` query heads share a KV head."""
        new, each = self._rows[1], QUERIES // padded(group)
        return float(new.sum() / (each * (-(-new // each)).sum()))

    def tiles(self, group: int) -> torch.Tensor:
        """Return the tiles of QUERIES queries where `group` query heads share a KV head, the longest first.

        -> int32 [num_tiles, FIELDS], on the device: first token in the step; tokens; start of the shared prefix in the
           layout, its length; start of the row's own tokens; own tokens before the tile's first
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
    """Compute the layout of rows [first_row, ...) of a step."""
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
    """Return 0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, and so on."""
    within: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return within
