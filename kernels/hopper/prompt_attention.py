"""The prefill path for Hopper GPUs: K and V are gathered densely for a kernel that reads dense blocks.

Gathering a token takes as long as the attention of about MIN_QUERIES queries to it: most rows that read a prompt gain,
few new tokens after a long prefix do not.
"""

from __future__ import annotations

import torch

from graftlm.kernels.gpu.attention.prefill_path import PrefillCall
from graftlm.kernels.gpu.verified_path import MAX_ERROR, VerifiedPath
from graftlm.kernels.hopper.gather_kv import lay_out
from graftlm.kernels.hopper.prompt_layout import MIN_TOKENS, PromptLayout, padded, prompt_layout
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.kv_store import CompactKV, Float8KV, KVStore
from graftlm.kernels.wire_plan import WirePlan

MIN_QUERIES = 400
"""The least average number of queries, of all heads of a KV head, that attend to a gathered token."""

FULL = 0.75
"""The least filled share of a tile, where a KV head's query heads are no power of two."""

FILLED = 0.6
"""The least filled share of all tiles, where rows end within tiles."""

SHARE = 64
"""A gathered step may take a SHARE-th of the card's memory; larger steps use another path."""


class PromptAttention(VerifiedPath):
    """Causal attention of the rows of a step with several new tokens, over their cached and new tokens."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        device = self._device = store.device
        on_hopper = device.type == "cuda" and torch.version.hip is None
        on_hopper = on_hopper and torch.cuda.get_device_capability(device) == (9, 0)
        self._kernel = gluon_kernel("hopper.prompt_kernel") if on_hopper and not isinstance(store, Float8KV) else None
        super().__init__("long prompts are attended more slowly", enabled=self._kernel is not None)
        self._max_bytes = torch.cuda.get_device_properties(device).total_memory // SHARE if self.enabled else 0
        self._layout: PromptLayout | None = None

    def prepare(self, plan: WirePlan, first_row: int) -> None:
        self._layout = None
        if self.enabled and plan.num_new[first_row:].sum() >= MIN_TOKENS:
            self._layout = prompt_layout(plan, first_row, self._device)

    def forget(self) -> None:
        self._layout = None

    def takes(self, call: PrefillCall) -> bool:
        layout, q, k, v, params = self._layout, call.q, call.k, call.v, call.params
        if layout is None or not self.enabled or self._kernel is None:
            return False
        kernel, group = self._kernel, q.shape[1] // k.shape[1]
        num_bytes = 2 * layout.num_tokens * k[0].numel() * k.itemsize
        plain = params.softcap is None and params.sinks is None and params.scale > 0
        plain = plain and (params.window is None or layout.longest <= params.window)
        heads = group <= kernel.MAX_GROUP and group >= FULL * padded(group)
        fits = heads and k.shape == v.shape and k.shape[2] in kernel.HEAD_DIMS and q.dtype in MAX_ERROR
        worth = group * layout.num_pairs >= MIN_QUERIES * layout.num_tokens and num_bytes <= self._max_bytes
        return (
            plain
            and fits
            and worth
            and layout.filled(group) >= FILLED
            and _aligned(q)
            and k.stride(-1) == v.stride(-1) == 1
        )

    def run(self, call: PrefillCall) -> torch.Tensor:
        layout, kernel, q, k, v, out = self._layout, self._kernel, call.q, call.k, call.v, call.out
        assert layout is not None and kernel is not None
        first, group = layout.first_token, q.shape[1] // k.shape[1]
        store, step, layer = self._store, call.step, call.layer
        exponents = store.exponents[layer] if isinstance(store, CompactKV) else None

        def fast() -> torch.Tensor:
            keys, values = k[first:], v[first:]
            if not (layout.dense and _aligned(k) and _aligned(v)):
                kept = (store.k[layer], store.v[layer], exponents)
                keys, values = lay_out(*kept, step.table, step.rows, k, v, layout.blocks)
            kernel.prompt_attention(q, keys, values, layout.tiles(group), call.params.scale, out)
            return out[first:]

        def plain() -> torch.Tensor:
            call.extend(call.rows)
            return out[first:]

        self.verified((q.shape[1:], k.shape[1:], q.dtype), fast, plain)
        return out


def _aligned(x: torch.Tensor) -> bool:
    """Return True if the copy engine can read `x`."""
    strides = all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
    return strides and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
