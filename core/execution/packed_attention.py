"""PackedAttention: one call a layer for the attention of encoders whose pictures and windows lie in one sequence.

transformers calls the attention of Qwen-VL's encoder once for each window, 70 times a layer for a picture of 1,024 x
768, unless the implementation takes packed sequences as FlashAttention does. It goes by the name of the implementation.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

IMPLEMENTATION = "graftlm_flash_packed"

_HALF = (torch.float16, torch.bfloat16)


class Segments:
    """The sequences of a packed one.

    bounds   where they begin and end
    longest  tokens of the longest
    """

    def __init__(self, bounds: list[int], device: torch.device) -> None:
        self.bounds, self._device = bounds, device
        self.longest = max((stop - start for start, stop in pairwise(bounds)), default=0)

    @classmethod
    def of(cls, offsets: torch.Tensor, device: torch.device | None = None) -> Segments:
        """Read offsets, [num_sequences + 1]. device: of the tokens, by default that of the offsets"""
        return cls(offsets.tolist(), device or offsets.device)

    @cached_property
    def by_length(self) -> list[torch.Tensor]:
        """For each length the tokens of the sequences that have it, int64 [num_sequences, length]."""
        starts: dict[int, list[int]] = {}
        for start, stop in pairwise(self.bounds):
            if stop > start:
                starts.setdefault(stop - start, []).append(start)
        return [
            (torch.tensor(firsts)[:, None] + torch.arange(length)).to(self._device) for length, firsts in starts.items()
        ]


class _Current(threading.local):
    segments: dict[int, tuple[torch.Tensor, Segments]] | None = None


_current = _Current()


class PackedAttention:
    """Run the encoder of a model on packed attention for the time of a call; other encoders stay as they are."""

    def __init__(self, model: nn.Module) -> None:
        configs = {
            id(module.config): module.config
            for module in model.modules()
            if hasattr(module, "config") and "cu_seqlens" in inspect.signature(module.forward).parameters
        }
        self._configs = [c for c in configs.values() if hasattr(c, "_attn_implementation_internal")]
        if self._configs:
            from transformers import AttentionInterface

            AttentionInterface.register(IMPLEMENTATION, packed_attention)

    @contextmanager
    def __call__(self, known: Mapping[int, tuple[torch.Tensor, Segments]] | None = None) -> Iterator[None]:
        """known: sequences by the id of their offsets, which need no reading"""
        _current.segments = dict(known or {})
        try:
            with attention_by(IMPLEMENTATION, self._configs):
                yield
        finally:
            _current.segments = None


@contextmanager
def attention_by(name: str, configs: Sequence[Any]) -> Iterator[None]:
    """Run the modules of `configs` on the attention of this name in transformers, and put their own back."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend each sequence of a packed one to itself, in both directions.

    query, key, value  [1, num_heads, num_tokens, head_dim]
    cu_seq_lens_q      offsets of the sequences, int32 [num_sequences + 1]; None: the tokens are one sequence
    -> [1, num_tokens, num_heads, head_dim]
    """
    if cu_seq_lens_q is None:
        out = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    segments = _segments(cu_seq_lens_q)
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]
    varlen = _varlen() if query.is_cuda and query.dtype in _HALF else None
    if varlen is not None:
        longest, offsets = segments.longest, cu_seq_lens_q.to(torch.int32)
        packed: torch.Tensor = varlen(*heads, offsets, offsets, longest, longest, scale=scaling)
        return packed[None], None
    joined = torch.empty_like(heads[0], memory_format=torch.contiguous_format)
    for tokens in segments.by_length:
        q, k, v = (x[tokens].transpose(1, 2) for x in heads)
        joined[tokens] = scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2)
    return joined[None], None


def _segments(offsets: torch.Tensor) -> Segments:
    """Return the sequences of these offsets, which are those of many layers."""
    if _current.segments is None:
        return Segments.of(offsets)
    held = _current.segments.get(id(offsets))
    if held is None:
        held = _current.segments[id(offsets)] = offsets, Segments.of(offsets)
    return held[1]


def _varlen() -> Any:
    """Return torch's attention of packed sequences; None where torch has none with a scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "scale" in inspect.signature(varlen_attn).parameters else None
