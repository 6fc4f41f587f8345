"""The KV store: one K and one V tensor per layer, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps per token: K [num_kv_heads, k_dim] and V [num_kv_heads, v_dim]."""

    num_kv_heads: int
    k_dim: int
    v_dim: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in this layer."""
        return self.num_kv_heads * (self.k_dim + self.v_dim) * dtype.itemsize


class KVStore:
    """K and V of every slot of the pool.

    k[layer]  [num_slots, num_kv_heads, k_dim]
    v[layer]  [num_slots, num_kv_heads, v_dim]

    On a CPU the memory is ordered by KV head first, so that one head's tokens lie in one run and stream a quarter
    faster; elsewhere by slot first. Strides tell; shapes are the same. Slots hold garbage until they are written;
    nobody reads a slot that no token was stored in.

    scales  for a store in float8: per layer float32 [2, num_kv_heads], it holds k / scales[layer][0] and
            v / scales[layer][1]; None for every other
    """

    def __init__(
        self,
        layout: Sequence[LayerKV],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scales: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.layout = tuple(layout)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self.scales = scales
        self.k = [self._allocate(layer.num_kv_heads, layer.k_dim) for layer in self.layout]
        self.v = [self._allocate(layer.num_kv_heads, layer.v_dim) for layer in self.layout]

    def _allocate(self, num_kv_heads: int, dim: int) -> torch.Tensor:
        # Untouched pages cost no memory: an empty tensor lets a large pool grow into its size.
        if self.device.type == "cpu":
            return torch.empty(num_kv_heads, self.num_slots, dim, dtype=self.dtype).transpose(0, 1)
        return torch.empty(self.num_slots, num_kv_heads, dim, dtype=self.dtype, device=self.device)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * sum(layer.num_bytes(self.dtype) for layer in self.layout)
