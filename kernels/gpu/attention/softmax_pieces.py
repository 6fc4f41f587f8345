"""The pieces of a row's tokens that one_order.py takes a softmax over, and room for what they come to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

SHORT = 64
"""Tokens of a piece."""
LONG = 256
"""Tokens of a piece that begins at `FAR` or later: few of them are to be added up."""
FAR = 1024

_SHORT, _LONG, _FAR = tl.constexpr(SHORT), tl.constexpr(LONG), tl.constexpr(FAR)


@triton.jit
def piece_of(n):
    """Which piece token n is in."""
    return tl.where(n < _FAR, n // _SHORT, n // _LONG + (_FAR // _SHORT - _FAR // _LONG))


@triton.jit
def start_of(piece):
    """The first token of a piece."""
    return tl.where(piece < _FAR // _SHORT, piece * _SHORT, (piece - (_FAR // _SHORT - _FAR // _LONG)) * _LONG)


@triton.jit
def added(high, total, acc, m, t, a):
    """What pieces came to, and the next one."""
    top = tl.maximum(high, m)
    kept, more = tl.exp2(high - top), tl.exp2(m - top)
    return top, total * kept + t * more, acc * kept[:, None] + a * more[:, None]


@triton.jit
def keep(part_out, part_stats, place, ok, m, total, acc, E: tl.constexpr, E_PAD: tl.constexpr):
    """Store a piece's result at place [M]: m, total [M], acc [M, E_PAD]."""
    e = tl.arange(0, E_PAD)
    tl.store(part_stats + place * 2, m, mask=ok)
    tl.store(part_stats + place * 2 + 1, total, mask=ok)
    tl.store(part_out + place[:, None] * E + e[None, :], acc, mask=ok[:, None] & (e < E)[None, :])


@triton.jit
def size_at(n):
    """Tokens of the piece that token n is in."""
    return tl.where(n < _FAR, _SHORT, _LONG)


def num_pieces(length: int) -> int:
    """Pieces of a row of `length` tokens."""
    return -(-min(length, FAR) // SHORT) - -max(length - FAR, 0) // LONG


@dataclass(frozen=True)
class Room:
    """Room for the results of the pieces of rows that decode, in float32.

    out          [at least num_rows * num_heads * most_pieces, v_dim]
    stats        [as many, 2]: the maximum, base 2, and the sum
    counters     int32 [at least num_rows * num_kv_heads]: programs of a row that are done; all zero between launches
    most_pieces  that a row can have
    """

    out: torch.Tensor
    stats: torch.Tensor
    counters: torch.Tensor
    most_pieces: int

    @classmethod
    def allocate(cls, num_rows: int, num_heads: int, v_dim: int, most_pieces: int, device: torch.device) -> Room:
        size = num_rows * num_heads * most_pieces
        return cls(
            torch.empty(size, v_dim, dtype=torch.float32, device=device),
            torch.empty(size, 2, dtype=torch.float32, device=device),
            torch.zeros(num_rows * num_heads, dtype=torch.int32, device=device),
            most_pieces,
        )


class Rooms:
    """Holds the room that launches share: one ends before the next."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, int], Room] = {}
        self._kept: list[Room] = []

    def find(self, num_rows: int, num_heads: int, v_dim: int, max_len: int, device: torch.device) -> Room | None:
        """Room for rows of up to `max_len` tokens; None if it would take too much memory.

        Graphs keep what they were captured with, so room that is too small is left to them.
        """
        most_pieces = num_pieces(max_len)
        if num_rows * num_heads * most_pieces * v_dim * 4 > _room_bytes(device):
            return None
        held = self._rooms.get((num_heads, v_dim))
        size, has_size, has_rows = num_rows * num_heads * most_pieces, 0, 0
        if held is not None:
            has_size, has_rows = len(held.stats), len(held.counters) // num_heads
        if held is None or has_size < size or has_rows < num_rows:
            size, rows = max(size, has_size), max(num_rows, has_rows)
            held = Room.allocate(rows, num_heads, v_dim, -(-size // (rows * num_heads)), device)
            self._kept.append(held)
            self._rooms[num_heads, v_dim] = held
        return replace(held, most_pieces=most_pieces)


def _room_bytes(device: torch.device) -> int:
    """What room may take: a 256th of the card's memory."""
    return torch.cuda.get_device_properties(device).total_memory >> 8 if device.type == "cuda" else 1 << 28
