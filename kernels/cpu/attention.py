"""Attention on a CPU: flash over views of the KV store, partial results merged by log-sum-exp.

Nothing is padded and no K or V is repeated for grouped queries: the heads of a group become further queries of
their KV head. A sequence's tokens lie in a few extents of the store; each extent is read in place through a view
and gives a partial result, and exp(lse)-weighted sums of partial results are exact. Where numba is there, loops of
our own take the place of most of these calls: one for the single queries of decode rows, one for blocks of queries.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from graftlm.kernels.attention import LayerSpec, Plan, Row
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention_metadata import Chunk, Group, Reads, Span, Work, lay_out, spans_of
from graftlm.kernels.kv_store import KVStore
from graftlm.kernels.transfer import send

if TYPE_CHECKING:
    from graftlm.kernels.cpu.decode_attention import CompiledDecode
    from graftlm.kernels.cpu.prefill_attention import CompiledChunks

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_QUERY_BLOCK = 512
"""Queries of a windowed chunk that are attended at once; bounds the mask."""


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


class TorchAttention:
    """The attention kernel for CPUs, and the definition that other kernels are compared with.

    compiled  whether the compiled loops may be used rather than their definition in torch
    """

    graph_safe = False

    def __init__(self, store: KVStore, *, compiled: bool = True) -> None:
        self.store = store
        self._plan: Plan | None = None
        self._out_slots = torch.empty(0, dtype=torch.int64, device=store.device)
        self._work: dict[tuple[int | None, int | None], Work] = {}
        self._compiles = (
            compiled
            and store.device.type == "cpu"
            and store.dtype in (torch.float32, torch.bfloat16)
            and importlib.util.find_spec("numba") is not None
        )
        self._loops: dict[tuple[int, int, int, bool], Loops] = {}

    def supports(self, layer: LayerSpec) -> str | None:
        if self.store.dtype.itemsize == 1:
            return f"it reads no KV in {str(self.store.dtype)[6:]}"
        if layer.num_heads % layer.num_kv_heads:
            return f"{layer.num_heads} query heads are no multiple of {layer.num_kv_heads} KV heads"
        return None

    def prepare(self, plan: Plan) -> None:
        self._plan = plan
        self._work = {}
        self._out_slots = send(plan.out_slots, self.store.device)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan | None,
        params: AttentionParams,
    ) -> torch.Tensor:
        assert plan is not None  # this kernel is not captured
        if plan is not self._plan:
            self.prepare(plan)
        loops = self._loops_for(q, k, v, params.softcap)
        block = loops.block if loops is not None else None
        work = self._work.get((params.window, block))
        if work is None:
            work = self._work[params.window, block] = lay_out(plan, params.window, block, self.store.device)
        k_store, v_store = self.store.k[layer], self.store.v[layer]
        if loops is None or not work.decode:
            k_store.index_copy_(0, self._out_slots, k)
            v_store.index_copy_(0, self._out_slots, v)
        return _LayerPass(k_store, v_store, params, loops).run(q, k, v, work)

    def _loops_for(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float | None) -> Loops | None:
        """The compiled loops for layers of this shape; None where the definition has to do."""
        if not self._compiles or not q.dtype == k.dtype == v.dtype == self.store.dtype:
            return None
        shape = (q.shape[1] // k.shape[1], k.shape[2], v.shape[2], softcap is not None)
        found = self._loops.get(shape)
        if found is None:
            found = self._loops[shape] = Loops.of(*shape, dtype=self.store.dtype)
        return found


@dataclass(frozen=True)
class Loops:
    """The compiled loops for layers of one shape. `chunks` is None where torch's flash attention has to do.

    block  queries that `chunks` reads together
    """

    decode: CompiledDecode
    chunks: CompiledChunks | None
    block: int | None

    @classmethod
    def of(cls, group: int, k_dim: int, v_dim: int, capped: bool, *, dtype: torch.dtype) -> Loops:
        from graftlm.kernels.cpu.decode_attention import CompiledDecode
        from graftlm.kernels.cpu.prefill_attention import COLUMNS, CompiledChunks

        decode = CompiledDecode(group, k_dim, v_dim, dtype, capped=capped)
        if capped or group > COLUMNS:
            return cls(decode, None, None)
        return cls(decode, CompiledChunks(group, k_dim, v_dim, dtype), COLUMNS // group)


@dataclass(frozen=True)
class _LayerPass:
    """One layer of one step."""

    k_store: torch.Tensor
    v_store: torch.Tensor
    params: AttentionParams
    loops: Loops | None

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work) -> torch.Tensor:
        """Attend all queries. Shapes as in Attention.forward."""
        scale, sinks = self.params.scale, self.params.sinks
        num_tokens, num_heads, _ = q.shape
        wide = bool(work.groups) or work.blocks is not None or sinks is not None
        out_dtype = torch.float32 if wide else q.dtype
        result = Partial(
            torch.empty(num_tokens, num_heads, v.shape[-1], dtype=out_dtype, device=q.device),
            torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device),
        )
        stores = (self.k_store, self.v_store)
        if self.loops is None:
            self.read_each(q, work.singles, result)
        elif len(work.singles.query):
            new = (k, v) if work.decode else None
            self.loops.decode.run(q, new, stores, work.singles, scale, self.params.softcap, *result)
        if work.blocks is not None:
            assert self.loops is not None and self.loops.chunks is not None
            self.loops.chunks.run(q, stores, work.blocks, scale, *result)
        for chunk in work.chunks:
            here = slice(chunk.row.start, chunk.row.start + chunk.row.num_new)
            part = self.chunk(q[here], k[here], v[here], chunk)
            result.out[here] = part.out
            result.lse[here] = part.lse
        for group in work.groups:
            result = self.add_group(result, q, group)
        out, lse = result
        if sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)): the share of the softmax that is left for the tokens
            out = out.float() * torch.sigmoid(lse - sinks.float())[..., None]
        return out.to(q.dtype)

    def read_each(self, q: torch.Tensor, reads: Reads, result: Partial) -> None:
        """Set `result` for each query of `reads`: the definition of the compiled loop."""
        num_heads, k_dim = q.shape[1:]
        num_kv_heads = self.k_store.shape[1]
        for query, (first, *others) in reads.each():
            grouped = q[query].reshape(1, num_kv_heads, num_heads // num_kv_heads, k_dim)
            part = self.read(grouped, first)
            for span in others:
                part = merge(part, self.read(grouped, span))
            result.out[query] = part.out.reshape(num_heads, -1)
            result.lse[query] = part.lse.reshape(num_heads)

    def read(self, q: torch.Tensor, span: Span) -> Partial:
        """All queries see all of the span. q [1, Hkv, M, Dk] -> out [1, Hkv, M, Dv], lse [1, Hkv, M]."""
        k, v = self.views(span)
        if _flash is not None and q.device.type == "cpu" and self.params.softcap is None and k.shape[-1] == v.shape[-1]:
            return Partial(*_flash(q, k, v, 0.0, False, scale=self.params.scale))
        return attend(q, k, v, scale=self.params.scale, softcap=self.params.softcap)

    def views(self, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the span in place: [1, Hkv, N, D]."""
        first, last = span
        return _view(self.k_store, first, last), _view(self.v_store, first, last)

    def chunk(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk) -> Partial:
        """Several new tokens of one row, without those that a group covers. q [n, Hq, Dk] -> [n, Hq, Dv], [n, Hq]."""
        num_new, num_heads, k_dim = q.shape
        num_kv_heads = k.shape[1]
        group = num_heads // num_kv_heads
        window = self.params.window
        if window is not None and chunk.row.past + num_new > window:
            return self.windowed_chunk(q, chunk.row, window)
        heads = q.view(num_new, num_kv_heads, group, k_dim).permute(1, 2, 0, 3)  # [Hkv, G, n, Dk]
        result = attend(
            heads,
            k.transpose(0, 1)[:, None].expand(num_kv_heads, group, num_new, k_dim),
            v.transpose(0, 1)[:, None].expand(num_kv_heads, group, num_new, v.shape[-1]),
            scale=self.params.scale,
            causal=True,
            softcap=self.params.softcap,
        )
        folded = heads.reshape(1, num_kv_heads, group * num_new, k_dim) if chunk.spans else heads
        for span in chunk.spans:
            out, lse = self.read(folded, span)
            result = merge(result, Partial(out.reshape(result.out.shape), lse.reshape(result.lse.shape)))
        return Partial(
            result.out.permute(2, 0, 1, 3).reshape(num_new, num_heads, -1),
            result.lse.permute(2, 0, 1).reshape(num_new, num_heads),
        )

    def windowed_chunk(self, q: torch.Tensor, row: Row, window: int) -> Partial:
        """Several new tokens of one row, the last of which no longer see its first tokens."""
        num_new, num_heads, k_dim = q.shape
        num_kv_heads = self.k_store.shape[1]
        group = num_heads // num_kv_heads
        parts: list[Partial] = []
        for low in range(0, num_new, _QUERY_BLOCK):
            high = min(low + _QUERY_BLOCK, num_new)
            first, last = max(row.past + low - window + 1, 0), row.past + high
            views = [self.views(span) for span in spans_of(row.extents, first, last)]
            k, v = views[0] if len(views) == 1 else (torch.cat([x[i] for x in views], 2) for i in (0, 1))
            position = torch.arange(row.past + low, last, device=q.device)[:, None]
            token = torch.arange(first, last, device=q.device)
            seen = (token <= position) & (token > position - window)
            out, lse = attend(
                q[low:high].view(high - low, num_kv_heads, group, k_dim).permute(1, 2, 0, 3),
                k[0][:, None].expand(num_kv_heads, group, last - first, k_dim),
                v[0][:, None].expand(num_kv_heads, group, last - first, v.shape[-1]),
                scale=self.params.scale,
                mask=seen,
                softcap=self.params.softcap,
            )
            parts.append(
                Partial(
                    out.permute(2, 0, 1, 3).reshape(high - low, num_heads, -1),
                    lse.permute(2, 0, 1).reshape(high - low, num_heads),
                )
            )
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

    def add_group(self, result: Partial, q: torch.Tensor, group: Group) -> Partial:
        """Let the group's queries see the tokens they share, read once for all of them."""
        shared = self.read_group(q, group)
        num_queries = len(group.index)
        if num_queries == q.shape[0]:
            return merge(result, shared)
        own = Partial(result.out.index_select(0, group.index), result.lse.index_select(0, group.index))
        merged = merge(own, shared)
        return Partial(
            result.out.float().index_copy(0, group.index, merged.out),
            result.lse.index_copy(0, group.index, merged.lse),
        )

    def read_group(self, q: torch.Tensor, group: Group) -> Partial:
        """The group's queries over the tokens they share. out [num_queries, Hq, Dv], lse [num_queries, Hq]."""
        num_heads, k_dim = q.shape[1:]
        num_queries = len(group.index)
        if group.blocks is not None:
            assert self.loops is not None and self.loops.chunks is not None
            out = torch.empty(len(q), num_heads, self.v_store.shape[2])
            lse = torch.empty(len(q), num_heads)
            self.loops.chunks.run(q, (self.k_store, self.v_store), group.blocks, self.params.scale, out, lse)
            if num_queries == len(q):
                return Partial(out, lse)
            return Partial(out.index_select(0, group.index), lse.index_select(0, group.index))
        num_kv_heads = self.k_store.shape[1]
        per_kv = num_heads // num_kv_heads
        folded = q.index_select(0, group.index).view(num_queries, num_kv_heads, per_kv, k_dim).permute(1, 0, 2, 3)
        folded = folded.reshape(1, num_kv_heads, num_queries * per_kv, k_dim)
        part: Partial | None = None
        for span in group.spans:
            read = self.read(folded, span)
            part = read if part is None else merge(part, read)
        assert part is not None
        shape = (num_kv_heads, num_queries, per_kv)
        return Partial(
            part.out.view(*shape, -1).transpose(0, 1).reshape(num_queries, num_heads, -1),
            part.lse.view(*shape).transpose(0, 1).reshape(num_queries, num_heads),
        )


def _view(store: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Slots [first, last) of one layer's K or V as [1, Hkv, N, D], in place."""
    _, num_kv_heads, dim = store.shape
    per_slot, per_head, _ = store.stride()
    return store.as_strided((1, num_kv_heads, last - first, dim), (0, per_head, per_slot, 1), first * per_slot)
