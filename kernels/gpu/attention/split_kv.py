"""Split KV: into how many parts the tokens of each decode row are cut. The parts run side by side and are then joined.

A row much longer than the others would still run when they have ended. So rows are cut by their lengths, into parts of
about one size. Source: flash decoding; parts of a step chosen on the host as in FlashInfer, arXiv 2501.01005.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

MAX_SPLITS = 32
"""Parts of a row, at most."""

PARTS = 64
"""An item is row * PARTS + part."""

EMPTY = PARTS - 1
"""An item without work: a part that no row has."""

TOTAL_PARTS = 2048
"""Room for the results of so many parts in all, however many rows there are."""

LONGER = 1.5
"""Where rows are whole, a row is cut if it is longer than so many times the mean and half as much again."""


class Parts(NamedTuple):
    """The programs of a decode kernel, for each KV head.

    items   int32 [num_items], on the device: row * PARTS + part, the longest rows first
    counts  int32 [num_rows], on the device: parts of each row
    most    parts that a row can have
    """

    items: torch.Tensor
    counts: torch.Tensor
    most: int


def max_parts(num_rows: int, splits: int) -> int:
    """Parts that one of `num_rows` rows can have, where rows of one length are cut into `splits`."""
    return splits if num_rows == 1 else max(splits, min(MAX_SPLITS, TOTAL_PARTS // num_rows))


def num_items(num_rows: int, splits: int) -> int:
    """Programs of each KV head: a captured graph has as many in every step."""
    return num_rows * splits + num_rows // 2


def cut(lens: np.ndarray, splits: int, items: np.ndarray, counts: np.ndarray) -> None:
    """Fill `items` [num_items(num_rows, splits)] and `counts` [num_rows] for rows of `lens` [num_rows] tokens."""
    num_rows = len(lens)
    share = lens * (num_rows * splits / max(int(lens.sum()), 1))  # in parts of the mean size
    slack, most = 1.0 if splits > 1 else LONGER, max_parts(num_rows, splits)
    while True:
        counts[:] = np.clip(np.ceil(share / slack - 0.5), 1, most)
        if counts.sum() <= len(items):
            break
        slack *= 1.25
    order = np.argsort(-lens, kind="stable")
    part, place = np.nonzero(counts[order] > np.arange(counts.max())[:, None])
    items[: len(part)] = order[place] * PARTS + part
    items[len(part) :] = EMPTY


@functools.lru_cache(maxsize=64)
def uniform_parts(num_rows: int, splits: int, device: torch.device) -> Parts:
    """Cut every row into `splits` parts, with room for two at least.

    Kernels for rows that are never cut are others, which would compile at the first such step.
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=device) * PARTS
    items = (torch.arange(splits, dtype=torch.int32, device=device)[:, None] + rows).view(-1)
    return Parts(items, torch.full_like(rows, splits), max(splits, 2))
