"""Attention over keys and values in int8, with a scale for each token and head.

Steps of few tokens a row read int8 in place, in a compiled loop. Other steps, and all steps without compiled loops,
widen the visible slots into a small store in the model's dtype, layer by layer, and attend to that store. On both paths
a query reads the rounded keys and values, its own token's included: its output does not depend on the batch.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from graftlm.kernels.attention import LayerSpec
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.cpu.attention.metadata import AttentionMetadata, Span, spans_of
from graftlm.kernels.kv_store import Int8KV, PlainKV
from graftlm.kernels.wire_plan import WirePlan, indptr_of

if TYPE_CHECKING:
    from graftlm.kernels.cpu.attention.decode import CompiledDecode


class SeenSlots:
    """The visible slots of a plan's rows, and the same plan over a store of these slots alone, in order.

    spans  of slots first, ..., last - 1, in order, none of which touch
    """

    def __init__(self, plan: WirePlan) -> None:
        of_rows = [spans_of(row.extents, 0, row.kv_len) for row in plan.rows]
        self.spans = _joined([span for spans in of_rows for span in spans])
        self._firsts = [first for first, _ in self.spans]
        self._places = [0]
        for first, last in self.spans:
            self._places.append(self._places[-1] + last - first)
        self.num_slots = self._places[-1]
        moved = [(self._place(first), self._place(first) + last - first) for spans in of_rows for first, last in spans]
        self.plan = replace(
            plan,
            out_slots=np.array([self._place(slot) for slot in plan.out_slots.tolist()], np.int64),
            extents=np.array(moved, np.int64).reshape(-1, 2),
            extent_ptr=indptr_of(list(map(len, of_rows))),
            slot_maps=np.full(plan.num_rows, -1, np.int64),
        )

    def _place(self, slot: int) -> int:
        index = bisect_right(self._firsts, slot) - 1
        return self._places[index] + slot - self._firsts[index]

    def widen(self, store: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Set out to store [num_slots, num_kv_heads, dim] times scales [num_slots, num_kv_heads] at visible slots."""
        for (first, last), place in zip(self.spans, self._places, strict=False):
            here = slice(first, last)
            torch.mul(store[here], scales[here, :, None], out=out[place : place + last - first])


def _joined(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


class Int8Attention(TorchAttention):
    """TorchAttention over a store in int8, for models in float32 or bfloat16.

    compiled  use compiled loops instead of their definition in torch, if numba is installed
    """

    def __init__(self, store: Int8KV, *, compiled: bool = True) -> None:
        super().__init__(store, compiled=False)
        self.int8 = store
        self._compiles = compiled and importlib.util.find_spec("numba") is not None
        self._alone: WirePlan | None = None
        self._seen: SeenSlots | None = None
        self._inner: TorchAttention | None = None
        self._decodes: dict[tuple[int, int, int, bool], CompiledDecode] = {}

    def supports(self, layer: LayerSpec) -> str | None:
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are no multiple of {layer.num_kv_heads} KV heads"
        return None

    def reads_in_place(self, dtype: torch.dtype) -> bool:
        return self._compiles

    def prepare(self, plan: WirePlan) -> None:
        super().prepare(plan)
        self._seen = None
        self._alone = plan.sharing(())

    def metadata_alone(self, window: int | None) -> AttentionMetadata:
        """Return the step's metadata for loops over single queries, without shared prefixes."""
        assert self._alone is not None
        return self.metadata(self._alone, window, None)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert plan is not None
        if plan is not self._plan:
            self.prepare(plan)
        found = self._read_in_place(layer, q, k, v, params)
        if found is not None:
            return found
        k, v = self.int8.append_rounded(layer, self._out_slots, k, v)
        inner, moved = self._widened(layer, q.dtype, plan)
        return inner.forward(0, q, k, v, moved, params)

    def forward_some(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        assert plan is not None
        if plan is not self._plan:
            self.prepare(plan)
        k, v = self.int8.append_rounded(layer, self._out_slots, k, v)
        inner, moved = self._widened(layer, q.dtype, plan)
        return inner.forward_some(0, q, k, v, moved, params, tokens)

    def _read_in_place(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor | None:
        """Run `forward` by the compiled loop; None, without effects, if the loop does not support the step."""
        if not self._compiles or params.sinks is not None or not q.dtype == k.dtype == v.dtype:
            return None
        metadata = self.metadata_alone(params.window)
        if metadata.chunks:
            return None
        stores = self.store.k[layer], self.store.v[layer]
        if not metadata.decode:
            self.int8.append_rounded(layer, self._out_slots, k, v)
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        decode = self._decode_for(q, k, v, capped=params.softcap is not None)
        decode.run(
            q,
            (k, v) if metadata.decode else None,
            stores,
            metadata.singles,
            params.scale,
            params.softcap,
            out,
            torch.empty(q.shape[:2], dtype=torch.float32),
            self.int8.token_scales[layer],
        )
        return out

    def _decode_for(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, capped: bool) -> CompiledDecode:
        shape = q.shape[1] // k.shape[1], k.shape[2], v.shape[2], capped
        found = self._decodes.get(shape)
        if found is None:
            from graftlm.kernels.cpu.attention.decode import CompiledDecode

            found = self._decodes[shape] = CompiledDecode(*shape[:3], q.dtype, capped=capped, int8=True)
        return found

    def _widened(self, layer: int, dtype: torch.dtype, plan: WirePlan) -> tuple[TorchAttention, WirePlan]:
        """Return a kernel over this layer's visible slots, widened to `dtype`, and the plan over these slots."""
        if self._inner is None:
            self._inner = TorchAttention(PlainKV([], 0, dtype), compiled=self._compiles)
        if self._seen is None:
            self._seen = SeenSlots(plan)
            self._inner.prepare(self._seen.plan)
        seen, inner, of_layer = self._seen, self._inner, self.store.layout[layer]
        if inner.store.layout != (of_layer,) or inner.store.num_slots != seen.num_slots:
            inner.store = PlainKV([of_layer], seen.num_slots, dtype)
        k_scales, v_scales = self.int8.token_scales[layer]
        seen.widen(self.store.k[layer], k_scales, inner.store.k[0])
        seen.widen(self.store.v[layer], v_scales, inner.store.v[0])
        return inner, seen.plan
