"""DecoderStack: a whole step of few tokens on a CPU, from token ids to logits, in one compiled call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graftlm.kernels.attention import Attention
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.cpu.attention.int8 import Int8Attention
from graftlm.kernels.cpu.attention.metadata import AttentionMetadata, QueryBlocks
from graftlm.kernels.cpu.calls import AFTER, ATTEND, BEFORE, COLUMNS, DecodeCall, MatmulCall, PrefillCall
from graftlm.kernels.cpu.compiled.loop_runtime import loop_address
from graftlm.kernels.cpu.decoder.decoder_layer import CompiledLayers, LayerWeights
from graftlm.kernels.cpu.decoder.greedy_steps import GreedySteps
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels
from graftlm.kernels.cpu.linear.skinny_linear import SMALL_BYTES, SkinnyLinear
from graftlm.kernels.kv_store import Int8KV, KVStore
from graftlm.kernels.norm import Norm
from graftlm.kernels.wire_plan import WirePlan


class Rotations(NamedTuple):
    """The rotary embeddings of a model's layers.

    tables  n -> cos and sin of positions 0, ..., n - 1: [number of rotations, n, rotary_dim], both halves equal
    layers  the number of each layer's rotation
    """

    tables: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    layers: Sequence[int]


class ScaledEmbedding(NamedTuple):
    """An embedding [num_embeddings, hidden_size], and the factor of its rows; 1 for a quantised one."""

    rows: torch.Tensor | QuantisedPanels
    scale: float = 1.0


class AttentionKind(NamedTuple):
    """The properties of layers that share a loop and the metadata of a step."""

    group: int
    head_dim: int
    num_kv_heads: int
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, w: LayerWeights, params: AttentionParams) -> AttentionKind:
        group = w.num_heads // w.num_kv_heads
        return cls(group, w.head_dim, w.num_kv_heads, params.scale, params.window, params.softcap)


class DecoderStack:
    """All decoder layers of a model, with its embedding, last norm and head.

    params         of each layer's attention, without sinks
    max_positions  limit of a sequence's length, beyond which some rotations change
    logit_cap      c of logits c * tanh(logits / c); None without
    """

    def __init__(
        self,
        layers: CompiledLayers,
        params: Sequence[AttentionParams],
        embedding: ScaledEmbedding,
        rotations: Rotations,
        norm: Norm,
        head: SkinnyLinear,
        max_positions: int,
        logit_cap: float | None = None,
    ) -> None:
        self.layers, self.embedding, self.norm, self.head = layers, embedding.rows, norm, head
        self._embedding_scale, self._logit_cap = embedding.scale, logit_cap
        self._num_embeddings, hidden_size = _shape(embedding.rows)
        layers.layers["table"] = rotations.layers
        self._gather: Any = None
        self.max_rows = layers.space.num_rows
        self._rotations, self._max_positions = rotations, max_positions
        self._num_positions = 0
        self._store: object = None
        self._k = self._v = np.zeros(0, np.int64)
        weights, dtype = layers.weights, layers.dtype
        by_kind: dict[AttentionKind, list[int]] = {}
        for index, (w, of_layer) in enumerate(zip(weights, params, strict=True)):
            by_kind.setdefault(AttentionKind.of(w, of_layer), []).append(index)
        num_heads = max(w.num_heads for w in weights)
        self._x = torch.empty(self.max_rows, hidden_size, dtype=dtype)
        self._lse, self._prefix_lse = torch.empty(2, self.max_rows, num_heads, dtype=torch.float32)
        self._prefix_out = torch.empty_like(layers.space.attended)
        self._kinds = [_KindOfLayers(self, kind, np.array(found)) for kind, found in by_kind.items()]
        self._head: Any = MatmulCall.from_buffer_copy(head.call)
        self._head.next_task = self._head.num_done = 0
        self._head.x, self._head.x_row = layers.space.inputs.data_ptr(), layers.space.inputs.shape[1]

    @property
    def memory(self) -> list[tuple[int, int]]:
        """Return the address ranges [first, end) in bytes of the weights that every step reads."""
        panels = [p for w in self.layers.weights for p in w.all_panels]
        return [*((p.address, p.address + p.num_bytes) for p in panels), *self.head.memory]

    def run(self, plan: WirePlan, ids: torch.Tensor, wanted: torch.Tensor, attention: Attention) -> torch.Tensor | None:
        """Compute a step for which `attention` is prepared, and store its keys and values.

        ids     int64 [num_tokens]
        wanted  int64 [num_wanted], the rows whose logits are returned
        attention  one whose `reads_in_place` returns True
        -> logits [num_wanted, vocab_size]; None, without effects, for an unsupported step
        Raises IndexError for an id outside the embedding.
        """
        self.layers.call.tokens = 0
        return self._run(plan, ids, wanted, attention, 1)

    def decode(
        self, plan: WirePlan, ids: torch.Tensor, wanted: torch.Tensor, attention: Attention, steps: GreedySteps
    ) -> NDArray[np.int64] | None:
        """Compute a step of one new token for each row, as `run` does, and further steps with the likeliest tokens.

        Updates ids, positions and slots in place to those of the step after the last.
        ids     int64 [num_rows]; the logits of all rows are used
        -> int64 [1 to num_steps, num_rows], the tokens of each step, -1 where the logits are not finite
        """
        num_rows = ids.shape[0]
        if num_rows > self.max_rows or any(not kind.sees_all(plan, steps.num_steps) for kind in self._kinds):
            return None
        tokens = np.empty((steps.num_steps, num_rows), np.int64)
        end_ptr = np.cumsum([0, *map(len, steps.ends)], dtype=np.int64)
        ends = np.array([token for of_row in steps.ends for token in of_row], np.int64)
        call = self.layers.call
        call.tokens, call.ends, call.end_ptr = (x.ctypes.data for x in (tokens, ends, end_ptr))
        call.interrupt = steps.interrupt.ctypes.data
        if self._run(plan, ids, wanted, attention, steps.num_steps) is None:
            return None
        return tokens[: call.steps_done]

    def _run(
        self, plan: WirePlan, ids: torch.Tensor, wanted: torch.Tensor, attention: Attention, num_steps: int
    ) -> torch.Tensor | None:
        assert isinstance(attention, TorchAttention)  # the only kernel whose `reads_in_place` is True
        num_rows, num_wanted = ids.shape[0], wanted.shape[0]  # `len` of a tensor takes microseconds
        lowest, highest = ids.min().item(), ids.max().item()
        if not 0 <= lowest <= highest < self._num_embeddings:  # the compiled code would read out of bounds
            wrong = highest if lowest >= 0 else lowest
            raise IndexError(f"token id {wrong} is no row of the embedding, which has {self._num_embeddings:,}")
        if num_rows > self.max_rows:
            return None
        if attention.store is not self._store:
            self._bind(attention)
        if not all([kind.read(plan, attention) for kind in self._kinds]):
            return None
        layers, call = self.layers, self.layers.call
        self._place(plan, num_steps)
        records = layers.layers
        records["k_store"], records["v_store"], records["num_slots"] = self._k, self._v, attention.store.num_slots
        if isinstance(attention.store, Int8KV):  # the attention's loop stores keys and values
            records["k_store"] = records["v_store"] = 0
        logits = torch.empty(num_wanted, self.head.num_out, dtype=layers.dtype)
        call.ids, call.positions = ids.data_ptr(), plan.positions.ctypes.data
        if isinstance(self.embedding, QuantisedPanels):
            self._gather = self.embedding.gather_call(ids, self._x)
            call.gather, call.rows = self.embedding.gather_loop, ctypes.addressof(self._gather)
        else:
            call.embedding, call.embedding_scale = self.embedding.data_ptr(), self._embedding_scale
        call.slots, call.attended = plan.out_slots.ctypes.data, layers.space.attended.data_ptr()
        call.lse, call.prefix_lse = self._lse.data_ptr(), self._prefix_lse.data_ptr()
        call.prefix_out = self._prefix_out.data_ptr()
        call.norm, call.eps, call.wide = self.norm.weight.data_ptr(), self.norm.eps, not self.norm.rounded
        head = self._head
        head.num_rows, head.out = num_wanted, logits.data_ptr()
        call.head, call.head_matmul = ctypes.addressof(head) if num_wanted else 0, self.head.function
        call.wanted, call.num_wanted = wanted.data_ptr(), num_wanted
        if call.tokens:
            firsts = [call.positions, call.slots]
            grow = np.concatenate([_words(firsts, num_rows), *(kind.last_ends for kind in self._kinds)])
            call.grow, call.num_grow = grow.ctypes.data, len(grow)
        alone = layers.is_small and max(kind.num_bytes for kind in self._kinds) < SMALL_BYTES
        layers.run(self._x[:num_rows], slice(None), BEFORE | ATTEND | AFTER, alone=alone, num_steps=num_steps)
        if self._logit_cap is not None:
            logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits

    def _bind(self, attention: TorchAttention) -> None:
        """Write the addresses of each layer's keys and values into its calls."""
        store = self._store = attention.store
        self._k, self._v = (np.array([x.data_ptr() for x in part], np.int64) for part in (store.k, store.v))
        for kind in self._kinds:
            kind.bind(self._k[kind.index], self._v[kind.index], store)

    def _place(self, plan: WirePlan, num_steps: int) -> None:
        """Point the call at cos and sin of the steps' positions; compute more of them if need be."""
        last = max(plan.longest, int(plan.positions.max()) + 1) + num_steps - 1
        if last > self._num_positions:
            self._num_positions = max(last, min(max(256, 1 << (last - 1).bit_length()), self._max_positions))
            tables = self._rotations.tables(self._num_positions)
            # the loop reads the first half only
            self._tables = [x[..., : x.shape[2] // 2].contiguous() for x in tables]
            call = self.layers.call
            self._rotary_dim = tables[0].shape[2]
        call = self.layers.call
        cos, sin = self._tables
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.table_size, call.table_row, call.rotary_dim = cos.stride(0), cos.shape[2], self._rotary_dim


def _shape(embedding: torch.Tensor | QuantisedPanels) -> tuple[int, int]:
    if isinstance(embedding, QuantisedPanels):
        return embedding.num_out, embedding.num_in
    num_embeddings, hidden_size = embedding.shape
    return num_embeddings, hidden_size


class _KindOfLayers:
    """The attention calls of layers of one kind, which differ in the addresses of keys and values only."""

    def __init__(self, stack: DecoderStack, kind: AttentionKind, index: Any) -> None:
        self.kind, self.index = kind, index
        self.num_bytes = 0
        self._held: object = None  # keeps memory alive to which the calls have addresses
        layers, capped, dim = stack.layers, kind.softcap is not None, kind.head_dim
        element = ElementFormat.of(layers.dtype)
        self.block_size = None if capped or kind.group > COLUMNS else COLUMNS // kind.group
        self._records = layers.layers
        self._singles = np.zeros(len(index), np.dtype(DecodeCall))
        self._blocks, self._prefixes = np.zeros((2, len(index)), np.dtype(PrefillCall))
        self._addresses = {name: _addresses(getattr(self, f"_{name}")) for name in ("singles", "blocks", "prefixes")}
        self._loop = kind.group, dim, dim, element, capped
        loop_address("decode_attention", *self._loop)
        if self.block_size is not None:
            self._records["prefill"][index] = loop_address("prefill_attention", kind.group, dim, dim, element)
        self._num_heads, self._item_bytes = kind.group * kind.num_kv_heads, layers.dtype.itemsize
        width = (kind.group + 2) * kind.num_kv_heads * dim
        attended, lse = layers.space.attended.data_ptr(), stack._lse.data_ptr()
        for calls in (self._singles, self._blocks, self._prefixes):
            calls["num_kv_heads"], calls["scale"] = kind.num_kv_heads, kind.scale
            calls["q"], calls["q_token"], calls["q_head"] = layers.space.qkv.data_ptr(), width, dim
            calls["out"], calls["lse"] = attended, lse
        self._singles["float32_out"], self._singles["softcap"] = 1, kind.softcap or 0.0
        self._prefixes["out"], self._prefixes["lse"] = stack._prefix_out.data_ptr(), stack._prefix_lse.data_ptr()

    def bind(self, k: Any, v: Any, store: KVStore) -> None:
        """Point the calls at keys and values [num layers of this kind], addresses, of a store."""
        for calls in (self._singles, self._blocks, self._prefixes):
            calls["k"], calls["v"], calls["num_slots"] = k, v, store.num_slots
        scales, singles = store.token_scales if isinstance(store, Int8KV) else None, self._singles
        name = "decode_attention" if scales is None else "decode_attention_int8"
        self._records["decode"][self.index] = loop_address(name, *self._loop)
        singles["new_k"] = singles["new_v"] = 0
        if scales is not None:
            for name, part in (("k_scale", 0), ("v_scale", 1)):
                singles[name] = [scales[layer][part].data_ptr() for layer in self.index]
            dim, num_kv_heads, num_heads = self.kind.head_dim, self.kind.num_kv_heads, self._num_heads
            singles["k_token"] = singles["v_token"] = singles["q_token"]
            singles["k_head"] = singles["v_head"] = dim
            singles["new_k"] = singles["q"] + num_heads * dim * self._item_bytes
            singles["new_v"] = singles["new_k"] + num_kv_heads * dim * self._item_bytes

    def read(self, plan: WirePlan, attention: TorchAttention) -> bool:
        """Set the calls for a step of these layers; return False if the loops do not support it."""
        if isinstance(attention, Int8Attention):
            metadata = attention.metadata_alone(self.kind.window)
            if not metadata.decode:
                return False
        else:
            metadata = attention.metadata(plan, self.kind.window, self.block_size)
        prefixes = [prefix.blocks for prefix in metadata.prefixes]
        if metadata.chunks or None in prefixes:
            return False
        shared = _shared_rows(metadata, plan)
        if shared is not None and shared.max() > 1:
            return False
        joined = QueryBlocks.joined([blocks for blocks in prefixes if blocks is not None])
        singles, records, index = metadata.singles, self._records, self.index
        self._held, self._singles_read = (metadata, joined, shared), singles
        calls = self._singles
        calls["num_queries"], calls["num_runs"] = len(singles.query), len(singles.runs) - 1
        calls["num_tasks"] = calls["num_runs"] * self.kind.num_kv_heads
        calls["query"], calls["indptr"], calls["spans"], calls["runs"] = singles.addresses
        records["singles"][index] = self._addresses["singles"] if len(singles.query) else 0
        records["shared"][index] = shared.ctypes.data if shared is not None else 0
        for name, calls, blocks in (("blocks", self._blocks, metadata.blocks), ("prefixes", self._prefixes, joined)):
            records[name][index] = self._addresses[name] if blocks is not None else 0
            if blocks is not None:
                calls["num_blocks"] = len(blocks.query_ptr) - 1
                calls["num_tasks"] = calls["num_blocks"] * self.kind.num_kv_heads
                places = blocks.addresses
                calls["query"], calls["visible"], calls["query_ptr"], calls["spans"], calls["span_ptr"] = places
        row_bytes = self.kind.num_kv_heads * self.kind.head_dim * attention.store.dtype.itemsize
        self.num_bytes = SMALL_BYTES if joined or metadata.blocks else singles.num_keys * row_bytes
        return True

    def sees_all(self, plan: WirePlan, num_steps: int) -> bool:
        """Return True if each row of one new token sees all of its tokens during `num_steps` steps."""
        window = self.kind.window
        return window is None or int(plan.past.max()) + num_steps <= window

    @property
    def last_ends(self) -> NDArray[np.int64]:
        """Return the addresses of the ends of all queries' last spans in the current step."""
        singles = self._singles_read
        return singles.spans.ctypes.data + 16 * (singles.indptr[1:] - 1) + 8


def _words(firsts: Sequence[int], num: int) -> NDArray[np.int64]:
    """Return the addresses of `num` int64 from each of `firsts` on."""
    return np.add.outer(np.array(firsts, np.int64), 8 * np.arange(num)).ravel()


def _addresses(calls: Any) -> Any:
    return calls.ctypes.data + calls.itemsize * np.arange(len(calls))


def _shared_rows(metadata: AttentionMetadata, plan: WirePlan) -> Any:
    """Return the number of prefixes that each token shares, uint8 [num_tokens]; None without prefixes."""
    if not metadata.prefixes:
        return None
    counts = np.zeros(plan.num_tokens, np.uint8)
    for prefix in metadata.prefixes:
        counts[prefix.index.numpy()] += 1
    return counts
