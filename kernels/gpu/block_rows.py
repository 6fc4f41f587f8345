"""Tokens of all layers copied between slots and rows of bytes, one launch for all tensors of one size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

WORD_BYTES = 8


class _Group(NamedTuple):
    """Tensors with the same number of bytes a token.

    table  int64 [2, num_tensors]: addresses, and offsets in a row, in words
    words  of a token
    """

    table: torch.Tensor
    words: int


@triton.jit(do_not_specialize=["num_tokens"])
def _copy(
    table, tokens, rows, num_tokens, num_tensors, row_words, WORDS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr
):
    i, tensor = tl.program_id(0), tl.program_id(1)
    slot, token = tl.load(tokens + i), tl.load(tokens + num_tokens + i)
    row = tl.load(tokens + 2 * num_tokens + i)
    slots = tl.load(table + tensor).to(tl.pointer_type(tl.int64)) + slot * WORDS
    out = rows + row * row_words + tl.load(table + num_tensors + tensor) + token * WORDS
    for start in tl.static_range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        if OUT:
            tl.store(out + word, tl.load(slots + word, mask=word < WORDS), mask=word < WORDS)
        else:
            tl.store(slots + word, tl.load(out + word, mask=word < WORDS), mask=word < WORDS)


class BlockRows:
    """The tensors of slots whose tokens lie together in whole words of 8 bytes; `left` has the indices of the rest.

    parts    [num_slots, ...] each, on a GPU; they must not move
    offsets  bytes before each part in a row, multiples of 8
    """

    def __init__(self, parts: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        self.left: list[int] = []
        found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for i, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
            num_bytes = part[:1].numel() * part.itemsize
            if part.is_contiguous() and not num_bytes % WORD_BYTES and not part.data_ptr() % WORD_BYTES:
                found[num_bytes // WORD_BYTES].append((part.data_ptr(), offset // WORD_BYTES))
            else:
                self.left.append(i)
        device = parts[0].device
        self._groups = [
            _Group(torch.tensor(entries, device=device).T.contiguous(), words) for words, entries in found.items()
        ]

    def gather(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy tokens from their slots to `rows`.

        tokens  int64 [3, num_tokens]: slot, token in its row, and row
        rows    uint8 [num_rows, row_bytes], contiguous
        """
        self._launch(tokens, rows, True)

    def scatter(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy tokens from `rows` to their slots; arguments as for `gather`."""
        self._launch(tokens, rows, False)

    def _launch(self, tokens: torch.Tensor, rows: torch.Tensor, out: bool) -> None:
        words = rows.view(torch.int64)
        for table, num_words in self._groups:
            grid = tokens.shape[1], table.shape[1]
            block = min(triton.next_power_of_2(num_words), 1024)
            _copy[grid](
                table, tokens, words, tokens.shape[1], table.shape[1], words.stride(0),
                WORDS=num_words, BLOCK=block, OUT=out, num_warps=4,
            )  # fmt: skip
