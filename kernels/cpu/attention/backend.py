"""Attention on a CPU: flash attention over views of the KV store, partial results merged by log-sum-exp.

Nothing is padded, and grouped-query attention repeats no K or V: the heads of a group become further queries of their
KV head. A sequence's tokens lie in a few extents of the store. Each extent is read in place through a view and yields a
partial result; merging partial results by their log-sum-exp is exact. With numba, compiled loops replace most calls:
one for the single queries of decode rows, one for blocks of queries.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.kernels.attention import Attention, LayerSpec
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.amx import HAS_TILES
from graftlm.kernels.cpu.attention.metadata import (
    AttentionMetadata,
    Chunk,
    DecodeQueries,
    SharedPrefix,
    Span,
    build_metadata,
    metadata_of,
    spans_of,
)
from graftlm.kernels.kv_store import KVStore
from graftlm.kernels.transfer import send
from graftlm.kernels.wire_plan import Row, WirePlan

if TYPE_CHECKING:
    from graftlm.kernels.cpu.attention.decode import CompiledDecode
    from graftlm.kernels.cpu.attention.prefill import CompiledPrefill

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_QUERY_BLOCK = 512
"""Queries of a chunk with a sliding window in one attention call: it bounds the size of the mask."""


_MIN_TOKENS = 16
"""Least tokens of a step for each single query: reading its keys takes as long as for a block of queries."""


class Partial(NamedTuple):
    """Attention over some of the keys. out [..., v_dim], lse float32 [...]: log of the sum of exp(scores)."""

    out: torch.Tensor
    lse: torch.Tensor


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend q [B, H, M, Dk] to k [B, H, N, Dk] and v [B, H, N, Dv]; any strides, stride 0 too.

    causal  query i sees keys 0..i (M == N).
    mask    bool [M, N], True where a query sees a key; each query sees one at least.
    -> out [B, H, M, Dv] as q, lse [B, H, M].
    """
    if _flash is not None and q.device.type == "cpu" and softcap is None and k.shape[-1] == v.shape[-1]:
        bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        return Partial(*_flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale))
    scores = (q.float() @ k.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    return Partial((scores.sub_(lse[..., None]).exp_() @ v.float()).to(q.dtype), lse)


def merge(a: Partial, b: Partial) -> Partial:
    """Join the partial results of disjoint sets of keys, in float32."""
    lse = torch.logaddexp(a.lse, b.lse)
    out = a.out.float() * (a.lse - lse).exp_()[..., None]
    return Partial(out.addcmul_(b.out.float(), (b.lse - lse).exp_()[..., None]), lse)


class TorchAttention(Attention):
    """The attention kernel for CPUs, and the reference of all other kernels.

    compiled  whether compiled loops may replace their definition in torch; `compiles`: whether they do
    """

    def __init__(self, store: KVStore, *, compiled: bool = True) -> None:
        self.store = store
        self._plan: WirePlan | None = None
        self._out_slots = torch.empty(0, dtype=torch.int64, device=store.device)
        self._metadata: dict[tuple[int | None, int | None, bool], AttentionMetadata] = {}
        self.compiles = (
            compiled
            and store.device.type == "cpu"
            and store.dtype in (torch.float32, torch.bfloat16)
            and importlib.util.find_spec("numba") is not None
        )
        self._loops: dict[tuple[int, int, int, bool], CompiledLoops] = {}

    def supports(self, layer: LayerSpec) -> str | None:
        if self.store.dtype.itemsize == 1:
            return f"it reads no KV in {str(self.store.dtype)[6:]}"
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are no multiple of {layer.num_kv_heads} KV heads"
        return None

    def reads_in_place(self, dtype: torch.dtype) -> bool:
        return self.compiles and self.store.dtype is dtype

    def prepare(self, plan: WirePlan) -> None:
        self._plan = plan
        self._metadata = {}
        self._out_slots = send(plan.out_slots, self.store.device)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: WirePlan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert plan is not None  # this kernel is not captured
        if plan is not self._plan:
            self.prepare(plan)
        if self.store.layout[layer].latent:
            # the whole key serves as value, too: torch's kernel wants both of one size
            metadata = self.metadata(plan, params.window, None)
            return self._run(layer, q, k, k, params, None, metadata)[..., : v.shape[-1]]
        loops = self._loops_for(q, k, v, params.softcap)
        block_size, has_tiles = (loops.block_size, loops.has_tiles) if loops is not None else (None, False)
        metadata = self.metadata(plan, params.window, block_size, has_tiles)
        return self._run(layer, q, k, v, params, loops, metadata)

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
        """Run `forward` for the output of some `tokens` [num_wanted] of the step only. -> [num_wanted, Hq, Dv]"""
        assert plan is not None
        if len(tokens) * _MIN_TOKENS > len(q) or len(plan.prefix_lens):
            return self.forward(layer, q, k, v, plan, params).index_select(0, tokens)
        if plan is not self._plan:
            self.prepare(plan)
        metadata = metadata_of(plan, params.window, tokens.tolist())
        loops = self._loops_for(q, k, v, params.softcap)
        return self._run(layer, q.index_select(0, tokens), k, v, params, loops, metadata)

    def _run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: AttentionParams,
        loops: CompiledLoops | None,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        store = self.store
        if loops is None or not metadata.decode:
            store.append(layer, self._out_slots, k, v)
        values = store.k[layer] if store.layout[layer].latent else store.v[layer]
        return _LayerPass(store.k[layer], values, params, loops).run(q, k, v, metadata)

    def metadata(
        self, plan: WirePlan, window: int | None, block_size: int | None, has_tiles: bool = False
    ) -> AttentionMetadata:
        """Return the metadata of the step for layers with this window and loops over blocks of `block_size` queries.

        has_tiles  as in `build_metadata`
        """
        found = self._metadata.get((window, block_size, has_tiles))
        if found is None:
            found = build_metadata(plan, window, block_size, self.store.device, has_tiles)
            self._metadata[window, block_size, has_tiles] = found
        return found

    def _loops_for(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float | None
    ) -> CompiledLoops | None:
        """Return the compiled loops for layers of this shape; None if torch computes instead."""
        if not self.compiles or not q.dtype == k.dtype == v.dtype == self.store.dtype:
            return None
        shape = (q.shape[1] // k.shape[1], k.shape[2], v.shape[2], softcap is not None)
        found = self._loops.get(shape)
        if found is None:
            found = self._loops[shape] = CompiledLoops.of(*shape, dtype=self.store.dtype)
        return found


@dataclass(frozen=True)
class CompiledLoops:
    """The compiled loops for layers of one shape.

    prefill     None where torch's flash attention is used instead: with a softcap, and for very large groups
    block_size  queries of a block of `prefill`
    has_tiles   whether torch's flash attention, with AMX tiles, is faster than `prefill` for many queries
    """

    decode: CompiledDecode
    prefill: CompiledPrefill | None
    block_size: int | None
    has_tiles: bool

    @classmethod
    def of(cls, group: int, k_dim: int, v_dim: int, capped: bool, *, dtype: torch.dtype) -> CompiledLoops:
        from graftlm.kernels.cpu.attention.decode import CompiledDecode
        from graftlm.kernels.cpu.attention.prefill import CompiledPrefill
        from graftlm.kernels.cpu.calls import COLUMNS

        decode = CompiledDecode(group, k_dim, v_dim, dtype, capped=capped)
        if capped or group > COLUMNS:
            return cls(decode, None, None, False)
        has_tiles = HAS_TILES and _flash is not None and dtype is torch.bfloat16 and k_dim == v_dim
        return cls(decode, CompiledPrefill(group, k_dim, v_dim, dtype), COLUMNS // group, has_tiles)


@dataclass(frozen=True)
class _LayerPass:
    """The attention of one layer in one step."""

    k_store: torch.Tensor
    v_store: torch.Tensor
    params: AttentionParams
    loops: CompiledLoops | None

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Attend all queries. Shapes as in Attention.forward."""
        scale, softcap, sinks = self.params.scale, self.params.softcap, self.params.sinks
        num_tokens, num_heads, _ = q.shape
        merged = bool(metadata.prefixes) or metadata.blocks is not None or sinks is not None
        out_dtype = torch.float32 if merged else q.dtype
        result = Partial(
            torch.empty(num_tokens, num_heads, v.shape[-1], dtype=out_dtype, device=q.device),
            torch.empty(num_tokens, num_heads, device=q.device, dtype=torch.float32),
        )
        singles, stores = metadata.singles, (self.k_store, self.v_store)
        if self.loops is None:
            self.read_each(q, singles, result)
        elif len(singles.query):
            new = (k, v) if metadata.decode else None
            self.loops.decode.run(q, new, stores, singles, scale, softcap, *result)
        if metadata.blocks is not None:
            assert self.loops is not None and self.loops.prefill is not None
            self.loops.prefill.run(q, stores, metadata.blocks, scale, *result)
        for chunk in metadata.chunks:
            here = slice(chunk.row.start, chunk.row.stop)
            part = self.chunk(q[here], k[here], v[here], chunk)
            result.out[here] = part.out
            result.lse[here] = part.lse
        for prefix in metadata.prefixes:
            result = self.add_prefix(result, q, prefix)
        out, lse = result
        if sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)): the tokens' share of the softmax
            out = out.float() * torch.sigmoid(lse - sinks.float())[..., None]
        return out.to(q.dtype)

    def read_each(self, q: torch.Tensor, queries: DecodeQueries, result: Partial) -> None:
        """Set `result` for each of `queries`: the definition of the compiled loop."""
        for query, spans in queries.each():
            part = self.read_spans(q[query : query + 1], spans)
            result.out[query], result.lse[query] = part.out[0], part.lse[0]

    def read_spans(self, q: torch.Tensor, spans: list[Span], result: Partial | None = None) -> Partial:
        """Attend q [n, Hq, Dk] to all of the spans, and merge into `result`. -> out [n, Hq, Dv], lse [n, Hq]"""
        heads = self.by_kv_head(q)
        folded = heads.reshape(1, heads.shape[0], -1, heads.shape[3])
        for span in spans:
            out, lse = self.read(folded, span)
            part = _by_token(out.reshape(*heads.shape[:3], -1), lse.reshape(heads.shape[:3]))
            result = part if result is None else merge(result, part)
        assert result is not None
        return result

    def read(self, q: torch.Tensor, span: Span) -> Partial:
        """Attend q [1, Hkv, M, Dk] to all of the span. -> out [1, Hkv, M, Dv], lse [1, Hkv, M]"""
        k, v = self.views(span)
        return self._attend(q, k, v)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Partial:
        return attend(q, k, v, scale=self.params.scale, softcap=self.params.softcap, **options)

    def views(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the span's K and V: [1, Hkv, N, D]."""
        first, last = span
        return _view(self.k_store, first, last), _view(self.v_store, first, last)

    def by_kv_head(self, q: torch.Tensor) -> torch.Tensor:
        """View [n, Hq, D] by KV head. -> [Hkv, Hq / Hkv, n, D]"""
        num_kv_heads = self.k_store.shape[1]
        return q.reshape(len(q), num_kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)

    def chunk(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk) -> Partial:
        """Attend several new tokens of one row, without a shared prefix. q [n, Hq, Dk] -> [n, Hq, Dv], [n, Hq]"""
        window = self.params.window
        if chunk.until is not None or (window is not None and chunk.row.kv_len > window):
            return self.masked_chunk(q, chunk.row, window, chunk.until)
        heads = self.by_kv_head(q)
        own = self._attend(
            heads,
            _each_query_head(k.transpose(0, 1), heads),
            _each_query_head(v.transpose(0, 1), heads),
            causal=True,
        )
        return self.read_spans(q, chunk.spans, _by_token(*own))

    def masked_chunk(
        self, q: torch.Tensor, row: Row, window: int | None, until: NDArray[np.int64] | None = None
    ) -> Partial:
        """Attend several new tokens of one row by a mask.

        window  whose first tokens are outside the window of the last
        until   int64 [num_new], the tokens of the row that each sees; None: those up to itself
        """
        parts: list[Partial] = []
        for low in range(0, row.num_new, _QUERY_BLOCK):
            high = min(low + _QUERY_BLOCK, row.num_new)
            first = 0 if window is None else max(row.past + low - window + 1, 0)
            last = row.past + high if until is None else int(until[low:high].max())
            views = [self.views(span) for span in spans_of(row.extents, first, last)]
            k, v = views[0] if len(views) == 1 else (torch.cat([x[i] for x in views], 2) for i in (0, 1))
            position = torch.arange(row.past + low, row.past + high, device=q.device)[:, None]
            token = torch.arange(first, last, device=q.device)
            seen = token <= position if until is None else token < send(until[low:high], q.device)[:, None]
            if window is not None:
                seen &= token > position - window
            heads = self.by_kv_head(q[low:high])
            k, v = _each_query_head(k[0], heads), _each_query_head(v[0], heads)
            parts.append(_by_token(*self._attend(heads, k, v, mask=seen)))
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def add_prefix(self, result: Partial, q: torch.Tensor, prefix: SharedPrefix) -> Partial:
        """Merge attention to the prefix into `result`; the prefix is read once for all of its queries."""
        index = prefix.index
        if prefix.blocks is not None:
            assert self.loops is not None and self.loops.prefill is not None
            shared = Partial(
                torch.empty(*q.shape[:2], self.v_store.shape[2], dtype=torch.float32),
                torch.empty(q.shape[:2], dtype=torch.float32),
            )
            self.loops.prefill.run(q, (self.k_store, self.v_store), prefix.blocks, self.params.scale, *shared)
            if len(index) < len(q):
                shared = Partial(shared.out.index_select(0, index), shared.lse.index_select(0, index))
        else:
            shared = self.read_spans(q.index_select(0, index), prefix.spans)
        if len(index) == len(q):
            return merge(result, shared)
        merged = merge(Partial(result.out.index_select(0, index), result.lse.index_select(0, index)), shared)
        return Partial(
            result.out.float().index_copy(0, index, merged.out),
            result.lse.index_copy(0, index, merged.lse),
        )


def _each_query_head(x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Expand K or V [Hkv, N, D] to the query heads of `heads` [Hkv, G, n, Dk], as a view [Hkv, G, N, D]."""
    return x[:, None].expand(-1, heads.shape[1], -1, -1)


def _by_token(out: torch.Tensor, lse: torch.Tensor) -> Partial:
    """Reorder out [Hkv, G, n, Dv] and lse [Hkv, G, n] by token. -> [n, Hq, Dv] and [n, Hq]"""
    return Partial(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _view(store: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """View slots [first, last) of one layer's K or V as [1, Hkv, N, D]."""
    _, num_kv_heads, dim = store.shape
    per_slot, per_head, _ = store.stride()
    return store.as_strided((1, num_kv_heads, last - first, dim), (0, per_head, per_slot, 1), first * per_slot)
