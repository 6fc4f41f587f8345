"""Decoder layers on a CPU, as two halves before and after attention: for few tokens, some hundred, and many.

Few tokens, as in decode steps, run compiled code with our own matmuls, which decoder_stack.py runs for all layers in
one call. Some hundred tokens, as in a prompt, run it in blocks. Many tokens run oneDNN's matmuls with compiled loops
between them, or on some processors our own matmuls (dot_layer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from graftlm.kernels.activation import Activation
from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import AFTER, BEFORE, HALVES, PHASES, LayerCall, LayersCall, MatmulCall
from graftlm.kernels.cpu.compiled.loop_runtime import Loop, loop_address
from graftlm.kernels.cpu.compiled.openmp import barrier
from graftlm.kernels.cpu.decoder.elementwise import Elementwise
from graftlm.kernels.cpu.decoder.mixture import CompiledExperts, ExpertsRecord, ExpertsSpace
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.linear.packed_linear import linear, own_panels
from graftlm.kernels.cpu.linear.panels import AnyPanels, segment
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels
from graftlm.kernels.cpu.linear.skinny_linear import SMALL_BYTES
from graftlm.kernels.norm import Norm


def _has(name: str) -> bool:
    """Return True if the processor has an instruction set, by torch's test of that name."""
    test = getattr(torch.cpu, f"_is_{name}_supported", None)
    return test is not None and bool(test())


DOTS = _has("avx512_bf16") and not _has("amx_tile")
"""True if our matmuls use the processor's fastest bfloat16 arithmetic: only oneDNN uses AMX tiles."""

MAX_DECODE_ROWS = {torch.float32: 64, torch.bfloat16: 64 if DOTS or own_panels(torch.bfloat16) else 16}
"""The largest number of rows for which our matmuls with plain weights are as fast as oneDNN's."""

MAX_QUANTISED_ROWS = 64
"""The largest number of rows of a call with quantised weights, which only our matmuls read."""

MAX_BLOCKED_ROWS = 384
"""The largest number of rows for which our code in blocks is faster than oneDNN, which allocates all intermediate
results and compiles for each number of rows."""

MIN_BLOCK = 64
"""The least rows of a block: smaller blocks read the weights too often."""

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer.

    qkv      the projections whose outputs are all heads of q, then of k, then of v: one weight, or three
    q_norm   RMSNorm of each query head before its rotary embedding, k_norm of each key head; both or none
    gate_up  gate and up projection, or one weight that holds the rows of both
    down     None, as `gate_up` is empty, for a mixture
    activation  of the gate
    mixture  experts with their router
    after_attention, after_mlp  RMSNorm of the attention's and of the MLP's output before it is added; None without

    All norms round alike, see `Norm.rounded`; weights of norms that round once are float32.
    """

    before_attention: Norm
    qkv: Sequence[AnyPanels]
    q_norm: Norm | None
    k_norm: Norm | None
    out: AnyPanels
    before_mlp: Norm
    gate_up: Sequence[AnyPanels]
    down: AnyPanels | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: Activation = "silu"
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    mixture: CompiledExperts | None = None

    @property
    def dtype(self) -> torch.dtype:
        panels = self.out
        return panels.dtype if isinstance(panels, QuantisedPanels) else panels.packed.dtype

    @property
    def norms(self) -> tuple[Norm, ...]:
        found = (self.before_attention, self.before_mlp, self.q_norm, self.k_norm, self.after_attention, self.after_mlp)
        return tuple(norm for norm in found if norm is not None)

    @property
    def num_bytes(self) -> int:
        experts = self.mixture.panels.num_bytes if self.mixture is not None else 0
        return sum(p.num_bytes for p in self.all_panels) + experts

    @property
    def is_quantised(self) -> bool:
        """Return True if no matmul of the layer has a plain weight."""
        return self.mixture is None and all(isinstance(panels, QuantisedPanels) for panels in self.all_panels)

    @property
    def is_wide(self) -> bool:
        """Return True if the norms' float32 weights multiply values that are not rounded."""
        return not self.before_attention.rounded

    @property
    def hidden_size(self) -> int:
        return self.before_attention.weight.shape[0]

    @property
    def num_qkv_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def gate_size(self) -> int:
        return sum(p.num_out for p in self.gate_up) // 2

    @property
    def all_panels(self) -> tuple[AnyPanels, ...]:
        return (*self.qkv, self.out, *self.gate_up, *([self.down] if self.down is not None else ()))

    def heads(self, qkv: torch.Tensor) -> QKV:
        """Return views of qkv [num_rows, num_qkv_heads * head_dim] by head."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q, k, v = qkv.view(qkv.shape[0], -1, self.head_dim).split(heads, 1)
        return q, k, v

    def problem(self) -> str | None:
        """Return the reason why the compiled code cannot compute the layer; None if it can."""
        if len(self.gate_up) == 1 and self.gate_size % PANEL:
            return "gate and up projection share a panel"
        if any(p.bias is not None for p in self.gate_up):
            return "gate and up projection have a bias"
        if self.q_norm is not None and self.k_norm is not None and self.q_norm.eps != self.k_norm.eps:
            return "the norms of queries and keys have different epsilons"
        if len({norm.rounded for norm in self.norms}) > 1:
            return "norms that round in different ways"
        return None


class Workspace:
    """Memory that the layers of a model share, one after the other.

    inputs    float32 [num_rows, widest input of a matmul]
    attended  float32 [num_rows, most num_heads * head_dim]
    """

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        dtype = layers[0].dtype
        quantised = all(layer.is_quantised for layer in layers)
        self.num_rows = num_rows = MAX_QUANTISED_ROWS if quantised else MAX_DECODE_ROWS[dtype]
        mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
        depths = [p.depth for layer in layers for p in layer.all_panels] + [m.panels.depth for m in mixtures]
        self.inputs = torch.empty(num_rows, max(depths), dtype=torch.float32)
        chosen = [(m.panels, m.top_k) for m in mixtures if m.router is not None]
        self.experts = ExpertsSpace(chosen, num_rows) if chosen else None
        heads = max(layer.num_qkv_heads * layer.head_dim for layer in layers)
        self.qkv = torch.empty(num_rows * heads, dtype=dtype)
        self.attended = torch.empty(
            num_rows * max(layer.num_heads * layer.head_dim for layer in layers), dtype=torch.float32
        )
        self.gate = torch.empty(num_rows * max(layer.gate_size for layer in layers), dtype=dtype)
        self.addend = torch.empty(num_rows * max(layer.hidden_size for layer in layers), dtype=dtype)


QKV_PRODUCT, OUT_PRODUCT, GATE_UP_PRODUCT, DOWN_PRODUCT = range(4)


class CompiledLayers:
    """The layers of a model for steps of few tokens, as calls of one compiled loop.

    layers    a LayerCall for each
    products  MatmulCalls [num_layers, 4]
    """

    def __init__(self, weights: Sequence[LayerWeights]) -> None:
        self.weights = tuple(weights)
        self.dtype = weights[0].dtype
        self.space = Workspace(weights)
        self.layers = np.zeros(len(weights), np.dtype(LayerCall))
        self.products = np.zeros((len(weights), 4), np.dtype(MatmulCall))
        self._counters = np.zeros((PHASES * len(weights) + 2, 2), np.int64)
        self._turn = np.zeros(1, np.int64)
        self._positions = torch.arange(self.space.num_rows)
        self.mixtures: list[ExpertsRecord | None] = []
        self._segments: list[object] = []  # keeps memory alive to which the matmuls have addresses
        element = ElementFormat.of(self.dtype)
        self._loop = Loop(LayersCall(), loop_address("decoder_layers", element))
        self.call = self._loop.call
        self.call.counters, self.call.barrier = self._counters.ctypes.data, barrier()
        self.call.turn = self._turn.ctypes.data
        self.call.matmul = loop_address("matmul", element, False)
        self.is_small = max(w.num_bytes for w in weights) < SMALL_BYTES
        for layer, products, w in zip(self.layers, self.products, weights, strict=True):
            self._lay_out(layer, products, w)
        num_tasks = self.products["num_tasks"]
        self.num_parts = int(num_tasks[num_tasks > 0].min())  # tasks of the narrowest matmul, one a thread

    def _lay_out(self, layer: Any, products: Any, w: LayerWeights) -> None:
        space, width, size = self.space, w.num_qkv_heads * w.head_dim, w.num_heads * w.head_dim
        inputs, attended = (space.inputs.data_ptr(), space.inputs.shape[1]), (space.attended.data_ptr(), size)
        qkv, gate = space.qkv.data_ptr(), space.gate.data_ptr()
        # float32 outputs are the next matmul's inputs if the widths are equal
        same = self.dtype is torch.float32
        self._product(products, QKV_PRODUCT, w.qkv, inputs, (qkv, width))
        addend = space.addend.data_ptr(), w.hidden_size
        after_attention, after_mlp = (addend if norm is not None else None for norm in (w.after_attention, w.after_mlp))
        self._product(
            products, OUT_PRODUCT, [w.out], attended if same and w.out.depth == size else inputs, after_attention
        )
        self.mixtures.append(self._mixture(layer, products, w, after_mlp))
        if w.down is not None:
            first, *ups = w.gate_up
            up = (ups[0].address, ups[0]) if ups else (first.address + first.num_bytes // 2, first)
            self._product(products, GATE_UP_PRODUCT, [first], inputs, (gate, w.gate_size), up=up)
            hidden = (gate, w.gate_size) if same and w.down.depth == w.gate_size else inputs
            self._product(products, DOWN_PRODUCT, [w.down], hidden, after_mlp)
        products[GATE_UP_PRODUCT]["gelu"] = w.activation == "gelu_tanh"
        places = products.ctypes.data + products.itemsize * np.arange(4)
        layer["qkv"], layer["o"], layer["gate_up"], layer["down"] = places
        layer["norm"], layer["eps"] = w.before_attention.weight.data_ptr(), w.before_attention.eps
        layer["mlp_norm"], layer["mlp_eps"] = w.before_mlp.weight.data_ptr(), w.before_mlp.eps
        if w.q_norm is not None and w.k_norm is not None:
            layer["q_norm"], layer["k_norm"] = w.q_norm.weight.data_ptr(), w.k_norm.weight.data_ptr()
            layer["head_eps"] = w.q_norm.eps
        layer["wide"], layer["addend"] = w.is_wide, addend[0]
        for name, norm in (("attention", w.after_attention), ("output", w.after_mlp)):
            if norm is not None:
                layer[f"{name}_norm"], layer[f"{name}_eps"] = norm.weight.data_ptr(), norm.eps
        layer["num_heads"], layer["num_kv_heads"], layer["head_dim"] = w.num_heads, w.num_kv_heads, w.head_dim
        layer["qkv_out"], layer["gate"], layer["gate_size"] = qkv, gate, w.gate_size

    def _mixture(self, layer: Any, products: Any, w: LayerWeights, out: tuple[int, int] | None) -> ExpertsRecord | None:
        """Set up a layer's mixture, if it has one, with inputs in the workspace; out: as in `_product`"""
        if w.mixture is None or w.mixture.router is None or self.space.experts is None:
            return None
        panels, router, inputs = w.mixture.panels, w.mixture.router, self.space.inputs
        held = ExpertsRecord(panels, router, w.mixture.top_k, self.space.experts, w.mixture.shared_gate)
        held.record.x, held.record.x_row = inputs.data_ptr(), inputs.shape[1]
        held.record.add, held.record.out = out is None, out[0] if out is not None else 0
        gate_up = products[GATE_UP_PRODUCT]  # names the rows that the norm writes
        gate_up["x"], gate_up["x_row"], gate_up["depth"] = inputs.data_ptr(), inputs.shape[1], panels.depth
        layer["mixture"], layer["experts"] = held.address, loop_address("experts", ElementFormat.of(self.dtype))
        return held

    def _product(
        self,
        products: Any,
        index: int,
        weights: Sequence[AnyPanels],
        x: tuple[int, int],
        out: tuple[int, int] | None = None,
        *,
        up: tuple[int, AnyPanels] | None = None,
    ) -> None:
        """Set up a matmul with these weights; x and out are address and row stride in elements.

        out  None adds to the residual stream
        up   of a gate projection, as in `segment`
        """
        found, forms = [], up[1].forms if up is not None else 0
        task = column = 0
        for panels in weights:
            num_out = out[1] if up is not None and out is not None else panels.num_out
            found.append(segment(task, num_out, column, panels, up))
            task += -(-num_out // PANEL)
            column += num_out
            forms |= panels.forms
        if self.dtype is torch.bfloat16 and forms and not all(panels.forms for panels in weights):
            forms |= HALVES  # of plain weights beside quantised ones
        segments = np.array(found, np.int64)
        self._segments.append(segments)
        product = products[index]
        product["num_tasks"], product["depth"] = task, weights[0].depth
        product["x"], product["x_row"] = x
        product["segments"], product["num_segments"] = segments.ctypes.data, len(weights)
        product["out"], product["out_row"] = out if out is not None else (0, column)
        product["add"], product["forms"] = out is None, forms

    def run(self, x: torch.Tensor, layers: slice, parts: int, *, alone: bool, num_steps: int = 1) -> None:
        """Run parts of the layers on x [num_rows, hidden_size], in place; all other fields of the call must be set.

        alone  whether to use one thread only
        """
        call, products = self.call, self.products[layers]
        products["num_rows"] = x.shape[0]
        call.x = x.data_ptr()
        products["out"][products["add"] != 0] = call.x
        for held in self.mixtures[layers]:
            if held is not None:
                held.record.num_rows = x.shape[0]
                held.record.out = call.x if held.record.add else held.record.out
        self._turn[0] = call.steps_done = 0
        call.num_steps = num_steps
        call.num_rows, call.hidden_size = x.shape
        call.layers, call.num_layers = self.layers[layers].ctypes.data, len(products)
        call.parts = parts
        self._loop.run(single_thread=alone or not call.barrier)

    def rotations(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Set the rotary embedding of the next rows: [num_rows, rotary_dim], both halves equal."""
        call = self.call
        call.cos, call.sin = cos.data_ptr(), sin.data_ptr()
        call.table_row, call.rotary_dim, call.table_size = cos.stride(0), cos.shape[1], 0

    def put_qkv(self, index: int, address: int) -> None:
        """Set the address of a layer's queries, keys and values."""
        self.layers[index]["qkv_out"] = self.products[index, QKV_PRODUCT]["out"] = address

    def run_half(self, x: torch.Tensor, index: int, part: int, *, alone: bool | None = None) -> None:
        """Run a part of one layer that neither stores nor reads keys and values.

        alone  whether to use one thread only; None decides by the size of the layers
        """
        call, layer = self.call, self.layers[index]
        call.ids = call.head = call.tokens = call.rows = layer["k_store"] = layer["shared"] = 0
        # a stack of layers may have left calls here whose memory is gone: the loop resets all calls at its end
        layer["singles"] = layer["blocks"] = layer["prefixes"] = 0
        call.positions = self._positions.data_ptr()
        self.run(x, slice(index, index + 1), part, alone=self.is_small if alone is None else alone)


class DecodeLayer(NamedTuple):
    """One of the compiled layers as two halves, before and after its attention."""

    layers: CompiledLayers
    place: int

    @property
    def weights(self) -> LayerWeights:
        return self.layers.weights[self.place]

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """Compute the rotated queries, keys and values of x [num_rows, hidden_size], dense.

        cos  [num_rows, rotary_dim], both halves equal; sin of the same shape
        -> q [num_rows, num_heads, head_dim], k, v [num_rows, num_kv_heads, head_dim]: views of the workspace
        """
        w = self.weights
        self.layers.rotations(cos, sin)
        self.layers.run_half(x, self.place, BEFORE)
        qkv = self.layers.space.qkv[: x.shape[0] * w.num_qkv_heads * w.head_dim]
        return w.heads(qkv.view(x.shape[0], -1))

    def after(self, x: torch.Tensor, attended: torch.Tensor, *, alone: bool | None = None) -> None:
        """Run the half after attention on x [num_rows, hidden_size], in place, with attention's output, dense.

        alone  as in `run_half`
        """
        wide = attended.float()
        self.layers.call.attended = wide.data_ptr()
        self.layers.run_half(x, self.place, AFTER, alone=alone)


class BlockLayer(NamedTuple):
    """One of the compiled layers for some hundred tokens, run in blocks of tokens.

    Intermediate results of a block stay in the processor's cache.
    """

    decode: DecodeLayer

    def takes(self, num_rows: int) -> bool:
        """Return True if this is the fastest class for `num_rows` tokens: there is a part for each thread."""
        layers = self.decode.layers
        is_fast = layers.space.num_rows >= MIN_BLOCK and 2 * torch.get_num_threads() <= layers.num_parts
        return num_rows <= MAX_BLOCKED_ROWS and is_fast and self.decode.weights.mixture is None

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """Run `DecodeLayer.before` with newly allocated results."""
        layers, place = self.decode.layers, self.decode.place
        w = self.decode.weights
        qkv = torch.empty(x.shape[0], w.num_qkv_heads * w.head_dim, dtype=x.dtype)
        try:
            for here in self._blocks(x.shape[0]):
                layers.put_qkv(place, qkv[here].data_ptr())
                layers.rotations(cos[here], sin[here])
                layers.run_half(x[here], place, BEFORE, alone=False)
        finally:
            layers.put_qkv(place, layers.space.qkv.data_ptr())
        return w.heads(qkv)

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Run `DecodeLayer.after`."""
        for here in self._blocks(x.shape[0]):
            self.decode.after(x[here], attended[here], alone=False)

    def _blocks(self, num_rows: int) -> Iterator[slice]:
        """Yield blocks of about equal size: a short one would read all weights for few rows."""
        num_blocks = -(-num_rows // self.decode.layers.space.num_rows)
        for index in range(num_blocks):
            yield slice(num_rows * index // num_blocks, num_rows * (index + 1) // num_blocks)


def padded(num_rows: int) -> int:
    """Round `num_rows` up to one of at most sixteen numbers between a power of 2 and the next.

    oneDNN compiles a matmul for every new number of rows, which takes half a millisecond and half a MiB. Padding costs
    at most one row in eight, and one in sixteen from 128 rows on.
    """
    step = max(8, (1 << (num_rows - 1).bit_length()) // 32)
    return -(-num_rows // step) * step


class PrefillLayer:
    """The halves of one layer for steps of many tokens."""

    def __init__(self, weights: LayerWeights, loops: Elementwise) -> None:
        self.weights = weights
        self.loops = loops

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> QKV:
        """Run `DecodeLayer.before` with newly allocated results."""
        w, num_rows = self.weights, x.shape[0]
        normed = _padded_rows(num_rows, w.hidden_size, x)
        self.loops.norm(x, w.before_attention, normed)
        parts = [linear(normed, panels)[:num_rows].unflatten(1, (-1, w.head_dim)) for panels in w.qkv]
        q, k, v = parts if len(parts) == 3 else parts[0].split([w.num_heads, w.num_kv_heads, w.num_kv_heads], 1)
        self.loops.rotate(q, k, cos, sin, w.q_norm, w.k_norm)
        return q, k, v

    def add_attended(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add the projected output of attention to x. -> the MLP's input, and rows of padding"""
        w, num_rows = self.weights, x.shape[0]
        inputs = _padded_rows(num_rows, attended[0].numel(), x)
        inputs[:num_rows].copy_(attended.flatten(1))
        normed = _padded_rows(num_rows, w.hidden_size, x)
        self.loops.add_norm(x, linear(inputs, w.out), w.after_attention, w.before_mlp, normed)
        return normed

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Run `DecodeLayer.after`."""
        w, normed = self.weights, self.add_attended(x, attended)
        if w.mixture is not None:
            self.loops.add_norm(x, w.mixture.routed(normed[: x.shape[0]]), w.after_mlp, None, None)
            return
        assert w.down is not None
        if len(w.gate_up) == 1:
            gate, up = linear(normed, w.gate_up[0]).split(w.gate_size, 1)
            hidden = torch.empty_like(gate, memory_format=torch.contiguous_format)
        else:
            gate, up = (linear(normed, panels) for panels in w.gate_up)
            hidden = gate
        self.loops.gate_mul(gate, up, hidden, w.activation)
        self.loops.add_norm(x, linear(hidden, w.down), w.after_mlp, None, None)


def _padded_rows(num_rows: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Allocate padded(num_rows) rows; rows after `num_rows` are 0."""
    x = torch.empty(padded(num_rows), size, dtype=like.dtype)
    x[num_rows:] = 0
    return x
