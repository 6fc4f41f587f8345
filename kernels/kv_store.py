"""The KV store: K and V of every slot of the pool, in one class for each format.

`allocate_kv` chooses the class. A kernel reads `k` and `v`, and asks for the class of its format where that has more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graftlm.kernels.bits12 import kv_codec
from graftlm.kernels.cpu import INT8_LARGEST, INT8_LEAST_SCALE
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.wire_plan import Extent

SCALE_BYTES = 4
"""Bytes of the float32 scale of each token and head in an int8 store."""

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
"""The largest number of FP8."""

KVCopy = list[tuple[torch.Tensor, ...]]
"""The KV of some slots outside of a store: for each layer the tensors of its format, [num_tokens, num_kv_heads, ...].

The tensors hold the bits of the store, so a copy is exact; `write` takes them from any device.
"""


@dataclass(frozen=True)
class LayerKV:
    """The KV of one token in one layer: K [num_kv_heads, k_dim] and V [num_kv_heads, v_dim].

    latent  whether V is the first part of K, and kept once (latent.py)
    """

    num_kv_heads: int
    k_dim: int
    v_dim: int
    latent: bool = False


class KVStore(Protocol):
    """K and V of every slot.

    k[layer]  [num_slots, num_kv_heads, any], what a slot holds of a key in this format; v[layer] of a value
    dtype     of the numbers that k and v hold; of an encoded format, of the numbers that it encodes

    On a CPU the memory is ordered by KV head first, so that one head's tokens are contiguous and stream a quarter
    faster; elsewhere by slot first. Shapes are the same. Slots hold garbage until they are written.
    """

    layout: tuple[LayerKV, ...]
    num_slots: int
    dtype: torch.dtype
    device: torch.device
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def num_bytes(self) -> int: ...

    def append(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Encode and store new tokens.

        slots  int32 or int64 [num_tokens]
        k      [num_tokens, num_kv_heads, k_dim], v [num_tokens, num_kv_heads, v_dim]; last dimension dense
        """
        ...

    def read(self, extents: Sequence[Extent]) -> KVCopy:
        """Return a copy of these slots, in order, on the device of the store."""
        ...

    def write(self, extents: Sequence[Extent], copy: KVCopy) -> None:
        """Store a copy in these slots. Raises ValueError for a copy of another format, layout or number of tokens."""
        ...

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return all tensors that slots hold in a layer, [num_slots, num_kv_heads, ...] each."""
        ...


class _SlotTensors:
    """Base of the formats: tensors whose first dimension is the slot."""

    def __init__(
        self, layout: Sequence[LayerKV], num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.layout = tuple(layout)
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = torch.device(device)
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return self.num_slots * sum(token_bytes(layer, self.dtype, type(self) is CompactKV) for layer in self.layout)

    def read(self, extents: Sequence[Extent]) -> KVCopy:
        return [
            tuple(torch.cat([part[start:stop] for start, stop in extents]) for part in self.parts(layer))
            for layer in range(len(self.layout))
        ]

    def write(self, extents: Sequence[Extent], copy: KVCopy) -> None:
        num_tokens = sum(stop - start for start, stop in extents)
        layers = [self.parts(layer) for layer in range(len(self.layout))]
        form = [[(num_tokens, *part.shape[1:], part.dtype) for part in parts] for parts in layers]
        found = [[(*part.shape, part.dtype) for part in parts] for parts in copy]
        if found != form:
            raise ValueError(f"a copy for {num_tokens} slots has the tensors {form}, this one {found}")
        for parts, copied in zip(layers, copy, strict=True):
            for part, source in zip(parts, copied, strict=True):
                offset = 0
                for start, stop in extents:
                    part[start:stop].copy_(source[offset : offset + stop - start])
                    offset += stop - start

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.k[layer], self.v[layer]

    def _allocate(self, num_kv_heads: int, *dim: int, dtype: torch.dtype) -> torch.Tensor:
        # Untouched pages cost no memory: an empty tensor lets a large pool grow into its size.
        if self.device.type == "cpu":
            return torch.empty(num_kv_heads, self.num_slots, *dim, dtype=dtype).transpose(0, 1)
        return torch.empty(self.num_slots, num_kv_heads, *dim, dtype=dtype, device=self.device)

    def _store_by_kernel(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Store by the kernel for GPUs; return False, with nothing done, where Triton does not run."""
        if triton_problem(self.device) is not None:
            return False
        from graftlm.kernels.gpu.elementwise import store_kv

        store_kv(k, v, self.k[layer], self.v[layer], slots, *self._encoding(layer))
        return True

    def _encoding(self, layer: int) -> tuple[torch.Tensor | None, ...]:
        """The arguments of `store_kv` that name the encoding: k_scale, v_scale, exponents."""
        return ()


class PlainKV(_SlotTensors):
    """Keys and values in a floating-point dtype: k[layer] [num_slots, num_kv_heads, k_dim], v[layer] [..., v_dim].

    In a layer whose KV is a latent, v is a view of k.
    """

    def __init__(
        self, layout: Sequence[LayerKV], num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(layout, num_slots, dtype, device)
        self.k = [self._allocate(layer.num_kv_heads, layer.k_dim, dtype=dtype) for layer in self.layout]
        self.v = [
            k[..., : layer.v_dim] if layer.latent else self._allocate(layer.num_kv_heads, layer.v_dim, dtype=dtype)
            for k, layer in zip(self.k, self.layout, strict=True)
        ]

    def append(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.layout[layer].latent:
            self.k[layer].index_copy_(0, slots.long(), k.to(self.dtype))
        elif not self._store_by_kernel(layer, slots, k, v):
            slots = slots.long()
            self.k[layer].index_copy_(0, slots, k.to(self.dtype))
            self.v[layer].index_copy_(0, slots, v.to(self.dtype))

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return (self.k[layer],) if self.layout[layer].latent else (self.k[layer], self.v[layer])


class Float8KV(PlainKV):
    """Keys and values in float8_e4m3fn, divided by a scale for each layer and KV head.

    scales  per layer float32 [2, num_kv_heads]: the store holds k / scales[layer][0] and v / scales[layer][1]
    """

    def __init__(
        self,
        layout: Sequence[LayerKV],
        num_slots: int,
        scales: Sequence[torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(layout, num_slots, FP8, device)
        self.scales = scales

    def append(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if not self._store_by_kernel(layer, slots, k, v):
            for held, x, scale in zip((self.k[layer], self.v[layer]), (k, v), self.scales[layer], strict=True):
                held[slots.long()] = (x.float() / scale[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)

    def _encoding(self, layer: int) -> tuple[torch.Tensor | None, ...]:
        return self.scales[layer][0], self.scales[layer][1]


class Int8KV(_SlotTensors):
    """Keys and values in int8, with a scale for each token and head. On CPUs.

    token_scales  per layer K's and V's, float32 [num_slots, num_kv_heads]; k and v times these are the numbers
    """

    def __init__(self, layout: Sequence[LayerKV], num_slots: int) -> None:
        super().__init__(layout, num_slots, torch.int8, "cpu")
        self.k = [self._allocate(layer.num_kv_heads, layer.k_dim, dtype=torch.int8) for layer in self.layout]
        self.v = [self._allocate(layer.num_kv_heads, layer.v_dim, dtype=torch.int8) for layer in self.layout]
        self.token_scales = [
            (
                self._allocate(layer.num_kv_heads, dtype=torch.float32),
                self._allocate(layer.num_kv_heads, dtype=torch.float32),
            )
            for layer in self.layout
        ]

    def append(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.append_rounded(layer, slots, k, v)

    def append_rounded(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `append`. -> the numbers that the store holds of k and v, in their own dtype"""
        rounded: list[torch.Tensor] = []
        held = self.k[layer], self.v[layer]
        for x, whole_store, scale_store in zip((k, v), held, self.token_scales[layer], strict=True):
            whole, scale = quantize(x)
            whole_store.index_copy_(0, slots, whole)
            scale_store.index_copy_(0, slots, scale)
            rounded.append((whole * scale[..., None]).to(x.dtype))
        return rounded[0], rounded[1]

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.k[layer], self.v[layer], *self.token_scales[layer]


class CompactKV(_SlotTensors):
    """Keys and values that were bfloat16, in 12 bits a number (bits12/kv_codec.py).

    records    per layer int32 [num_slots, num_kv_heads, 2 * words]: the words of K, then those of V. `k` and `v` are
               views of these halves
    exponents  per layer uint8 [num_kv_heads, num_slots, 2]: K's and V's

    Raises ValueError for heads of a size that kv_codec.py does not encode.
    """

    def __init__(self, layout: Sequence[LayerKV], num_slots: int, device: torch.device | str = "cpu") -> None:
        super().__init__(layout, num_slots, torch.bfloat16, device)
        for layer in self.layout:
            if layer.k_dim != layer.v_dim or layer.k_dim not in kv_codec.DIMS:
                raise ValueError(
                    f"a compact KV store is for heads of {kv_codec.SIZES} dimensions, not of {layer.k_dim} (K) and "
                    f"{layer.v_dim} (V)"
                )
        self.records = [
            self._allocate(layer.num_kv_heads, 2 * kv_codec.words_of(layer.k_dim), dtype=torch.int32)
            for layer in self.layout
        ]
        self.k, self.v = ([x.chunk(2, -1)[i] for x in self.records] for i in (0, 1))
        self.exponents = [
            torch.empty(layer.num_kv_heads, num_slots, 2, dtype=torch.uint8, device=self.device)
            for layer in self.layout
        ]

    def append(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if not self._store_by_kernel(layer, slots, k, v):
            slots = slots.long()
            for part, (held, x) in enumerate(((self.k[layer], k), (self.v[layer], v))):
                held[slots], exponents = kv_codec.pack(x.bfloat16())
                self.exponents[layer][:, slots, part] = exponents.T

    def _encoding(self, layer: int) -> tuple[torch.Tensor | None, ...]:
        return None, None, self.exponents[layer]

    def parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.records[layer], self.exponents[layer].transpose(0, 1)


def allocate_kv(
    layout: Sequence[LayerKV],
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    scales: Sequence[torch.Tensor] = (),
    compact: bool = False,
) -> KVStore:
    """Allocate a store in the format that `dtype` and `compact` name.

    scales   of Float8KV, for a store in float8
    compact  12 bits a number; `dtype` is that of the numbers, which must be bfloat16
    """
    if compact:
        if dtype is not torch.bfloat16:
            raise ValueError(f"a compact KV store is for bfloat16, not for {dtype}")
        return CompactKV(layout, num_slots, device)
    if dtype is torch.int8:
        return Int8KV(layout, num_slots)
    if dtype is FP8:
        return Float8KV(layout, num_slots, scales, device)
    return PlainKV(layout, num_slots, dtype, device)


def all_parts(store: KVStore) -> list[torch.Tensor]:
    """Return all that slots hold, layer by layer, [num_slots, num_kv_heads, ...] each."""
    return [part for layer in range(len(store.layout)) for part in store.parts(layer)]


def token_bytes(layer: LayerKV, dtype: torch.dtype, compact: bool = False) -> int:
    """Return the bytes of one token in a layer of the store that `allocate_kv` makes."""
    if compact:
        return 2 * layer.num_kv_heads * kv_codec.bytes_of(layer.k_dim)
    scales = 2 * SCALE_BYTES if dtype is torch.int8 else 0
    if layer.latent:
        return layer.num_kv_heads * layer.k_dim * dtype.itemsize
    return layer.num_kv_heads * ((layer.k_dim + layer.v_dim) * dtype.itemsize + scales)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] -> int8 [..., dim] and float32 scales [...]; their product is off by half a scale at most."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / INT8_LARGEST).clamp_min(INT8_LEAST_SCALE)
    whole = wide / scale[..., None]
    return (whole + torch.copysign(torch.tensor(0.5, dtype=torch.float32), whole)).to(torch.int8), scale
