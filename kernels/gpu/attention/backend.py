"""Attention on a GPU: Triton kernels over the KV store, in steps that a CUDA graph can replay."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from graftlm.kernels.attention import Attention, LayerSpec, PackedQKV
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.gpu.attention.decode import DecodeRows, Scales, Workspace, decode_attention, num_splits
from graftlm.kernels.gpu.attention.extend import CompactRows, ExtendRows, extend_attention
from graftlm.kernels.gpu.attention.latent import LatentStep, attend_expanded, latent_decode, latent_splits
from graftlm.kernels.gpu.attention.one_order import OneOrder
from graftlm.kernels.gpu.attention.prefill_path import PrefillCall, PrefillPath
from graftlm.kernels.gpu.attention.qkv_rope_store import rotate_store
from graftlm.kernels.gpu.attention.shared_prefix import PrefixRows, decode_prefix, num_prefix_splits
from graftlm.kernels.gpu.attention.split_kv import TOTAL_PARTS, uniform_parts
from graftlm.kernels.gpu.attention.step_buffers import DeviceStep, Layout
from graftlm.kernels.hopper.prompt_attention import PromptAttention
from graftlm.kernels.hopper.support import gluon_kernel
from graftlm.kernels.kv_store import CompactKV, Float8KV, KVStore
from graftlm.kernels.latent import LatentHeads
from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import WirePlan

MAX_HEAD_DIM = 512
OLDEST_FOR_FLOAT8 = (8, 9)  # compute capability


class TritonAttention(Attention):
    """Decode rows through split KV, the others through extend, or in a faster way where there is one.

    Lengths and tables are read on the device. Decode rows come first in a plan. `bind` sets where steps are read from:
    a captured graph reads the buffers it was captured with.

    strict  every row is summed in one order (one_order.py), so that a token's result is the same, to the last bit,
            in every batch, however it was cut into steps. Set before the first step.
    paths   what prefill rows may go through: the first that takes the step, else the extend kernel

    Of a compact store decode reads all tokens, extend those from before the step. Where the kernel for decode is
    missing, as on a CPU, rows that decode go through extend.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.device = store.device
        self.strict = False
        self.prompts = PromptAttention(store)
        self.paths: tuple[PrefillPath, ...] = (self.prompts,)
        self._in_12_bits = store if isinstance(store, CompactKV) else None
        self._in_float8 = store if isinstance(store, Float8KV) else None
        on_card = self._in_12_bits is not None and self.device.type == "cuda"
        self._compact = gluon_kernel("bits12.decode") if on_card else None
        self.num_sms = 1
        if self.device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._step: DeviceStep | None = None
        self._layout: Layout | None = None
        self._cached = True  # whether rows that extend have tokens from before the step
        self._one_each = torch.arange(4097, dtype=torch.int32, device=self.device)
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._kept: list[Workspace] = []
        self._one_order = OneOrder(self.num_sms)
        self._has_latents = any(layer.latent for layer in store.layout)
        self._latent_step: LatentStep | None = None
        self._plan: WirePlan | None = None  # of which some tokens see later ones
        self._until: torch.Tensor | None = None

    def supports(self, layer: LayerSpec) -> str | None:
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are no multiple of {layer.num_kv_heads} KV heads"
        if layer.latent and (layer.window is not None or layer.softcap is not None or layer.sinks):
            return "latent attention with a window, a softcap or sinks"
        if max(layer.k_dim, layer.v_dim) > MAX_HEAD_DIM and not layer.latent:
            return f"a head has {max(layer.k_dim, layer.v_dim)} dimensions, the kernels go up to {MAX_HEAD_DIM}"
        if self._compact is not None:
            group = layer.num_heads // layer.num_kv_heads
            if group > self._compact.MAX_GROUP:
                return (
                    f"{group} query heads share a KV head, and with KV in 12 bits at most {self._compact.MAX_GROUP} can"
                )
        if self.store.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            return f"the KV store is {self.store.dtype}; use float32, float16, bfloat16 or float8_e4m3fn"
        if self.store.dtype.itemsize == 1 and self.device.type == "cuda":
            found = torch.cuda.get_device_capability(self.device)
            if found < OLDEST_FOR_FLOAT8:
                return f"KV in float8 needs a card of compute capability 8.9, this one has {found[0]}.{found[1]}"
        return None

    def bind(self, step: DeviceStep, layout: Layout) -> None:
        """Read steps from `step`, which holds one of this layout."""
        self._step, self._layout, self._cached, self._latent_step = step, layout, True, None
        self._plan = self._until = None
        for path in self.paths:
            path.forget()

    def prepare(self, plan: WirePlan) -> None:
        """Send the plan to buffers of its own size."""
        num_rows, num_tokens, longest = plan.num_rows, plan.num_tokens, plan.longest
        step = self._step
        if step is None or step.max_rows < num_rows or step.max_tokens < num_tokens or step.max_len < longest:
            sizes = (num_rows, num_tokens, longest)
            if step is not None:
                sizes = (max(sizes[0], step.max_rows), max(sizes[1], step.max_tokens), max(sizes[2], step.max_len))
            rows, tokens, length = (1 << (size - 1).bit_length() for size in sizes)
            step = DeviceStep(rows, tokens, length, 0, self.device, num_splits=self.num_splits)
        layout = step.write(plan)
        self.bind(step, layout)
        if plan.until is not None:
            self._plan, self._until = plan, send(plan.until.astype(np.int32), self.device)
        self._cached = bool(plan.past[0 if self._extends_only else layout.num_decode :].any())
        if self._has_latents:
            self._latent_step = LatentStep.of(plan, step, layout, strict=self.strict)
            return
        for path in () if self.strict else self.paths:
            path.prepare(plan, layout.num_decode)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert self._step is not None
        self.store.append(layer, self._step.slots[: len(k)], k, v)
        return self._attend(layer, q, k, v, params)

    def forward_latent(
        self,
        layer: int,
        heads: LatentHeads,
        q: torch.Tensor,
        latent: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        step, layout, mixed = self._step, self._layout, self._latent_step
        assert step is not None and layout is not None
        self.store.append(layer, step.slots[: len(latent)], latent, latent)
        if mixed is None:
            rows = slice(0, layout.num_rows)
            parts = None if self.strict else step.parts(layout.num_rows)
            each = DecodeRows(step.table, step.rows[rows], step.lens[rows], step.zeros[rows], parts)
            return self._absorbed(layer, heads, q, each, params)
        out = torch.empty(*q.shape[:2], heads.up_v.shape[1], dtype=q.dtype, device=q.device)
        if len(mixed.tokens):
            parts = (
                None if self.strict else uniform_parts(len(mixed.tokens), self.num_splits(len(mixed.tokens)), q.device)
            )
            each = DecodeRows(step.table, mixed.rows, mixed.lens, mixed.lens, parts)
            out[mixed.tokens] = self._absorbed(layer, heads, q[mixed.tokens], each, params)
        for row in mixed.expanded:
            new = slice(row.first, row.last)
            out[new] = attend_expanded(heads, q[new], self.store.k[layer], row, params)
        return out

    def _absorbed(
        self, layer: int, heads: LatentHeads, q: torch.Tensor, rows: DecodeRows, params: AttentionParams
    ) -> torch.Tensor:
        """Attend one token of each row."""
        most = rows.parts.most if rows.parts is not None else 2
        workspace = self._workspace(len(q), q.shape[1], heads.rank, most)
        absorbed = heads.absorb(q)
        return heads.project(latent_decode(absorbed, self.store.k[layer], rows, workspace, params.scale, heads.rank))

    def forward_packed(
        self,
        layer: int,
        packed: PackedQKV,
        plan: WirePlan | None,
        params: AttentionParams,
        *,
        last_token_only: bool = False,
    ) -> torch.Tensor:
        step, layout = self._step, self._layout
        assert step is not None and layout is not None
        k_store, v_store = self.store.k[layer], self.store.v[layer]
        # the norm of a head is summed in an order that depends on it
        block = 4 if self.strict and packed.q_norm is not None else None
        q, k, v = rotate_store(
            packed,
            k_store,
            v_store,
            step.slots,
            *self._scale_pair(layer),
            block=block,
            exponents=self._exponents(layer),
        )
        if not last_token_only:
            return self._attend(layer, q, k, v, params)
        last = step.indptr[1 : layout.num_rows + 1] - 1
        if self._extends_only:
            return self._attend(layer, q, k, v, params)[last]
        return self._decode(layer, q[last], params, all_rows=True)

    @property
    def _extends_only(self) -> bool:
        """Whether rows that decode go through extend too."""
        return self.strict or (self._in_12_bits is not None and self._compact is None)

    def _exponents(self, layer: int) -> torch.Tensor | None:
        return self._in_12_bits.exponents[layer] if self._in_12_bits is not None else None

    def _scales(self, layer: int) -> Scales | None:
        store = self._in_float8
        return None if store is None else Scales(store.scales[layer][0], store.scales[layer][1])

    def _scale_pair(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        scales = self._scales(layer)
        return (None, None) if scales is None else (scales.k, scales.v)

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend all rows, whose K and V are in the store."""
        step, layout = self._step, self._layout
        assert step is not None and layout is not None
        q = q if q.stride(-1) == 1 else q.contiguous()
        num_decode = layout.num_decode
        if num_decode == layout.num_rows and not self._extends_only:
            return self._decode(layer, q[:num_decode], params)
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        extend = partial(self._extend, layer, q, k, v, params, out)
        if num_decode and self._extends_only:
            extend(slice(0, num_decode))
        elif num_decode:
            self._decode(layer, q[:num_decode], params, out=out[:num_decode])
        if num_decode == layout.num_rows:
            return out
        if self._until_of(params) is not None:  # only this kernel lets a token see later ones
            extend(slice(num_decode, layout.num_rows))
            return out
        call = PrefillCall(layer, q, k, v, params, step, out, slice(num_decode, layout.num_rows), extend)
        for path in self.paths:
            if path.takes(call):
                return path.run(call)
        extend(call.rows)
        return out

    def _extend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        out: torch.Tensor,
        rows: slice,
    ) -> None:
        """Attend these rows through the kernel that reads the table."""
        step, layout = self._step, self._layout
        assert step is not None and layout is not None
        max_new = 1 if rows.stop <= layout.num_decode else layout.max_new
        exponents = self._exponents(layer)
        compact = CompactRows(exponents, k, v, self._cached) if exponents is not None else None
        until = self._until_of(params) if rows.stop > layout.num_decode else None
        step_rows = ExtendRows(step.table, step.rows[rows], step.lens[rows], self._indptr(rows), max_new, until)
        kv = self.store.k[layer], self.store.v[layer]
        if self.strict:
            self._one_order.attend(q, *kv, step_rows, params, scales=self._scales(layer), out=out)
        else:
            extend_attention(q, *kv, step_rows, params, scales=self._scales(layer), compact=compact, out=out)

    def _until_of(self, params: AttentionParams) -> torch.Tensor | None:
        """The tokens that each new one sees in a layer with this window; None if these are the earlier ones."""
        return None if self._plan is None or self._plan.sees(params.window) is None else self._until

    def _indptr(self, rows: slice) -> torch.Tensor:
        """Where the new tokens of these rows are. int32 [number of rows + 1]"""
        step, layout = self._step, self._layout
        assert step is not None and layout is not None
        if layout.num_decode < layout.num_rows:
            return step.indptr[rows.start : rows.stop + 1]
        if len(self._one_each) <= layout.num_rows:
            self._one_each = torch.arange(2 * layout.num_rows + 1, dtype=torch.int32, device=self.device)
        return self._one_each[: layout.num_rows + 1]

    def _decode(
        self,
        layer: int,
        q: torch.Tensor,
        params: AttentionParams,
        *,
        all_rows: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend the last token of each row that decodes, perhaps by way of the prefix that they share.

        all_rows  of each row of the step instead, each by itself
        """
        step, layout = self._step, self._layout
        assert step is not None and layout is not None
        k, v, exponents = self.store.k[layer], self.store.v[layer], self._exponents(layer)
        num_rows, num_heads, _ = q.shape
        num_kv_heads = k.shape[1]
        splits = self.num_splits(num_rows)
        first = slice(0, num_rows)
        # a window may end before the shared prefix does: then each row reads what it sees by itself
        shared = not all_rows and layout.prefix and params.window is None
        prefix_splits = num_prefix_splits(num_rows, num_heads, num_kv_heads, self.num_sms) if shared else 0
        parts = uniform_parts(num_rows, splits, self.device) if all_rows else step.parts(num_rows)
        rows = DecodeRows(
            step.table, step.rows[first], step.lens[first], (step.starts if shared else step.zeros)[first], parts
        )
        num_parts = parts.most + prefix_splits
        workspace = self._workspace(num_rows, num_heads, self.store.layout[layer].v_dim, num_parts)
        if shared:
            decode_prefix(
                q,
                k,
                v,
                rows,
                PrefixRows(step.prefix_len, step.members[first], step.num_members),
                workspace,
                params,
                splits=prefix_splits,
                num_parts=num_parts,
                scales=self._scales(layer),
                exponents=exponents,
            )
        options: dict[str, Any] = {"splits": splits, "num_prefix": prefix_splits, "out": out}
        if self._compact is None:
            return decode_attention(q, k, v, rows, workspace, params, scales=self._scales(layer), **options)
        assert self._in_12_bits is not None
        found: torch.Tensor = self._compact.compact_decode_attention(
            q, self._in_12_bits.records[layer], exponents, rows, workspace, params, **options
        )
        return found

    def num_splits(self, num_rows: int) -> int:
        """Parts that the tokens of `num_rows` rows of one length are cut into."""
        layout = self.store.layout
        if self._has_latents:
            return latent_splits(num_rows, self.num_sms)
        of_grid = num_rows, min(layer.num_kv_heads for layer in layout), self.num_sms, max(x.k_dim for x in layout)
        if self._compact is not None:
            compact: int = self._compact.num_splits(*of_grid)
            return compact
        return num_splits(*of_grid)

    def _workspace(self, num_rows: int, num_heads: int, v_dim: int, num_parts: int) -> Workspace:
        """Room for a launch, which all launches share: one ends before the next begins.

        Graphs keep what they were captured with, so room that is too small is left to them.
        """
        rows = max(num_rows * num_parts, TOTAL_PARTS)
        held = self._workspaces.get((num_heads, v_dim))
        if held is None or len(held.lse) < rows * num_heads or len(held.counters) < num_rows * num_heads:
            held = Workspace.allocate(num_rows, num_heads, v_dim, -(-rows // num_rows), self.device)
            self._kept.append(held)
            self._workspaces[num_heads, v_dim] = held
        return held
