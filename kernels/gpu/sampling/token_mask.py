"""Token masks on a GPU: a packed mask applied to logits, and a byte automaton walked over the whole vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _apply_mask(logits, mask, rows, logits_row, mask_row, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    b = tl.load(rows + r).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    word = tl.load(mask + r.to(tl.int64) * mask_row + i // 32, mask=ok, other=0)
    keep = ((word >> (i % 32)) & 1) != 0
    tl.store(logits + b * logits_row + i, float("-inf"), mask=ok & (keep == 0))


def apply_mask(logits: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set the logits of forbidden tokens to -inf, in place.

    logits  [num_rows, vocab_size], last dimension dense
    mask    int32 [num_masks, ceil(vocab_size / 32)]: bit i % 32 of word i // 32 set = token i allowed
    rows    int32 [num_masks]: which row of `logits` each mask is for
    """
    n = logits.shape[1]
    _apply_mask[(mask.shape[0], triton.cdiv(n, 2048))](
        logits, mask, rows, logits.stride(0), mask.stride(0), n, BLOCK=2048, num_warps=4
    )


@triton.jit
def _walk_mask(
    logits, rows, states, transitions, classes, token_bytes, token_lens, logits_row, bytes_row, num_classes, n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    b = tl.load(rows + r).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < n
    length = tl.load(token_lens + i, mask=ok, other=0)
    state = tl.zeros([BLOCK], tl.int32) + tl.load(states + r)
    state = tl.where(length > 0, state, -1)  # special tokens spell nothing
    longest = tl.max(length, 0)
    for position in range(0, longest):
        alive = (position < length) & (state >= 0)
        byte = tl.load(token_bytes + position * bytes_row + i, mask=alive, other=0).to(tl.int32)
        kind = tl.load(classes + byte, mask=alive, other=0)
        state = tl.where(alive, tl.load(transitions + state * num_classes + kind, mask=alive, other=-1), state)
    tl.store(logits + b * logits_row + i, float("-inf"), mask=ok & (state < 0))


def walk_mask(
    logits: torch.Tensor,
    rows: torch.Tensor,
    states: torch.Tensor,
    transitions: torch.Tensor,
    classes: torch.Tensor,
    token_bytes: torch.Tensor,
    token_lens: torch.Tensor,
) -> None:
    """Forbid every token that leads an automaton out of its language, in place, without any mask made before.

    logits       [num_rows, vocab_size]
    rows         int32 [num_masks]  which row of `logits` each state is for
    states       int32 [num_masks]
    transitions  int32 [num_states, num_classes]  -1 where the byte is not allowed
    classes      int32 [256]  the class of a byte
    token_bytes  uint8 [max_token_bytes, vocab_size]  byte p of token i, so that neighbours load together
    token_lens   int32 [vocab_size]  0 for special tokens, which are forbidden
    """
    n = logits.shape[1]
    _walk_mask[(states.shape[0], triton.cdiv(n, 512))](
        logits, rows, states, transitions, classes, token_bytes, token_lens, logits.stride(0), token_bytes.stride(0),
        transitions.shape[1], n, BLOCK=512, num_warps=4,
    )  # fmt: skip
