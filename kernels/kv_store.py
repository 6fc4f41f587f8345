"""The KV store: one K and one V tensor per layer, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftlm.kernels.bits12 import kv_codec

SCALE_BYTES = 4
"""Bytes of the float32 scale that a store in int8 keeps for each token and head."""


@dataclass(frozen=True)
class LayerKV:
    """The KV of one token in one layer: K [num_kv_heads, k_dim] and V [num_kv_heads, v_dim]."""

    num_kv_heads: int
    k_dim: int
    v_dim: int

    def num_bytes(self, dtype: torch.dtype, compact: bool = False) -> int:
        """Bytes of one token in this layer. compact: in 12 bits a number (kv_codec.py), whatever the dtype."""
        if compact:
            return 2 * self.num_kv_heads * kv_codec.bytes_of(self.k_dim)
        if dtype is torch.int8:
            return self.num_kv_heads * (self.k_dim + self.v_dim + 2 * SCALE_BYTES)
        return self.num_kv_heads * (self.k_dim + self.v_dim) * dtype.itemsize


class KVStore:
    """K and V of every slot of the pool.

    k[layer]  [num_slots, num_kv_heads, k_dim]
    v[layer]  [num_slots, num_kv_heads, v_dim]

    On a CPU the memory is ordered by KV head first, so that one head's tokens lie in one run and stream a quarter
    faster; elsewhere by slot first. Strides tell; shapes are the same. Slots hold garbage until they are written;
    nobody reads a slot that no token was stored in.

    scales     for a store in float8: per layer float32 [2, num_kv_heads], it holds k / scales[layer][0] and
               v / scales[layer][1]; None for every other
    token_scales  of a store in int8: per layer K's and V's, float32 [num_slots, num_kv_heads], ordered by head in
               memory, by which k and v are to be multiplied; None for every other
    compact    k[layer] and v[layer] are int32 [num_slots, num_kv_heads, words], in 12 bits a number (kv_codec.py), and
               `dtype`, which is bfloat16, is what they are computed in
    records    of a compact store: per layer int32 [num_slots, num_kv_heads, 2 * words], the words of K and then those
               of V, whose parts k and v are; None for every other
    exponents  of a compact store: per layer uint8 [num_kv_heads, num_slots, 2], K's and V's; None for every other

    Raises ValueError for a compact store of another dtype, or of heads of a size that kv_codec.py does not take.
    """

    def __init__(
        self,
        layout: Sequence[LayerKV],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Sequence[torch.Tensor] | None = None,
        compact: bool = False,
    ) -> None:
        self.layout = tuple(layout)
        if compact:
            _check_compact(self.layout, dtype)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self.scales = scales
        self.compact = compact
        self.records: list[torch.Tensor] | None = None
        self.exponents: list[torch.Tensor] | None = None
        self.token_scales: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        if dtype is torch.int8:
            self.token_scales = [
                (self._allocate_scales(layer.num_kv_heads), self._allocate_scales(layer.num_kv_heads))
                for layer in self.layout
            ]
        if compact:
            self.records = [
                self._allocate(layer.num_kv_heads, 2 * kv_codec.words_of(layer.k_dim), torch.int32)
                for layer in self.layout
            ]
            self.k, self.v = ([x.chunk(2, -1)[i] for x in self.records] for i in (0, 1))
            self.exponents = [self._allocate_exponents(layer.num_kv_heads) for layer in self.layout]
        else:
            self.k = [self._allocate(layer.num_kv_heads, layer.k_dim, dtype) for layer in self.layout]
            self.v = [self._allocate(layer.num_kv_heads, layer.v_dim, dtype) for layer in self.layout]

    def _allocate(self, num_kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        # Untouched pages cost no memory: an empty tensor lets a large pool grow into its size.
        if self.device.type == "cpu":
            return torch.empty(num_kv_heads, self.num_slots, dim, dtype=dtype).transpose(0, 1)
        return torch.empty(self.num_slots, num_kv_heads, dim, dtype=dtype, device=self.device)

    def _allocate_scales(self, num_kv_heads: int) -> torch.Tensor:
        return torch.empty(num_kv_heads, self.num_slots, dtype=torch.float32, device=self.device).t()

    def _allocate_exponents(self, num_kv_heads: int) -> torch.Tensor:
        return torch.empty(num_kv_heads, self.num_slots, 2, dtype=torch.uint8, device=self.device)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * sum(layer.num_bytes(self.dtype, self.compact) for layer in self.layout)


def _check_compact(layout: Sequence[LayerKV], dtype: torch.dtype) -> None:
    if dtype is not torch.bfloat16:
        raise ValueError(f"a compact KV store is for bfloat16, not for {dtype}")
    for layer in layout:
        if layer.k_dim != layer.v_dim or layer.k_dim not in kv_codec.DIMS:
            raise ValueError(
                f"a compact KV store is for heads of {kv_codec.SIZES} dimensions, not of {layer.k_dim} (K) and "
                f"{layer.v_dim} (V)"
            )
