"""Attention on a GPU: Triton kernels over the KV store, in steps that a CUDA graph can replay."""

from __future__ import annotations

import torch

from graftlm.kernels.attention import LayerSpec, Plan
from graftlm.kernels.device_step import DeviceStep, Layout
from graftlm.kernels.kv_store import KVStore
from graftlm.kernels.triton_decode import DecodeRows, PrefixRows, Workspace, decode_attention, num_splits
from graftlm.kernels.triton_elementwise import store_kv
from graftlm.kernels.triton_extend import ExtendRows, extend_attention

MAX_HEAD_DIM = 256
PREFIX_SPLITS = 16


class TritonAttention:
    """Decode rows through split KV, the rest through extend; lengths and tables are read on the device.

    Decode rows come first in a plan. `bind` sets where steps are read from: a captured graph reads the buffers it was
    captured with.
    """

    graph_safe = True

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.device = store.device
        self.num_sms = 1
        if self.device.type == "cuda":
            self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._step: DeviceStep | None = None
        self._layout: Layout | None = None
        self._workspaces: dict[tuple[int, int, int, int], Workspace] = {}

    def supports(self, layer: LayerSpec) -> str | None:
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are no multiple of {layer.num_kv_heads} KV heads"
        if max(layer.k_dim, layer.v_dim) > MAX_HEAD_DIM:
            return f"a head has {max(layer.k_dim, layer.v_dim)} dimensions, the kernels go up to {MAX_HEAD_DIM}"
        if self.store.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"the KV store is {self.store.dtype}; use float32, float16 or bfloat16"
        return None

    def bind(self, step: DeviceStep, layout: Layout) -> None:
        """Read steps from `step`, which holds one of this layout."""
        self._step, self._layout = step, layout

    def prepare(self, plan: Plan) -> None:
        """Send the plan to buffers of its own size."""
        num_tokens = plan.rows[-1].start + plan.rows[-1].num_new
        longest = max(row.past + row.num_new for row in plan.rows)
        step = self._step
        if step is None or step.max_rows < len(plan.rows) or step.max_tokens < num_tokens or step.max_len < longest:
            sizes = (len(plan.rows), num_tokens, longest)
            if step is not None:
                sizes = (max(sizes[0], step.max_rows), max(sizes[1], step.max_tokens), max(sizes[2], step.max_len))
            rows, tokens, length = (1 << (size - 1).bit_length() for size in sizes)
            step = DeviceStep(rows, tokens, length, 0, self.device)
        self.bind(step, step.write(plan))

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan | None,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step, layout = self._step, self._layout
        assert step is not None and layout is not None
        k_store, v_store = self.store.k[layer], self.store.v[layer]
        store_kv(k, v, k_store, v_store, step.slots)
        q = q if q.stride(-1) == 1 else q.contiguous()
        num_decode, num_rows = layout.num_decode, layout.num_rows
        parts: list[torch.Tensor] = []
        if num_decode:
            parts.append(self._decode(q[:num_decode], k_store, v_store, step, layout, scale, window, softcap, sinks))
        if num_decode < num_rows:
            rows = ExtendRows(
                step.table,
                step.rows[num_decode:num_rows],
                step.lens[num_decode:num_rows],
                step.indptr[num_decode : num_rows + 1],
                layout.max_new,
            )
            extended = extend_attention(
                q, k_store, v_store, rows, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            parts.append(extended[num_decode:] if num_decode else extended)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        step: DeviceStep,
        layout: Layout,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        num_rows, num_heads, _ = q.shape
        splits = num_splits(num_rows, k.shape[1], self.num_sms)
        rows = slice(0, num_rows)
        # a window may end before the shared prefix does: then each row reads what it sees by itself
        shared = layout.prefix and window is None
        starts = step.starts if shared else step.zeros
        prefix = PrefixRows(step.prefix_len, step.members[rows], step.num_members) if shared else None
        prefix_splits = PREFIX_SPLITS if shared else 0
        return decode_attention(
            q,
            k,
            v,
            DecodeRows(step.table, step.rows[rows], step.lens[rows], starts[rows]),
            self._workspace(num_rows, num_heads, v.shape[2], splits + prefix_splits),
            splits=splits,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            prefix=prefix,
            prefix_splits=max(prefix_splits, 1),
        )

    def _workspace(self, num_rows: int, num_heads: int, v_dim: int, num_parts: int) -> Workspace:
        key = (num_rows, num_heads, v_dim, num_parts)
        if key not in self._workspaces:
            self._workspaces[key] = Workspace.allocate(*key, self.device)
        return self._workspaces[key]
