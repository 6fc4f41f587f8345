"""Fused decoder layers on CPUs: a decode step runs two compiled calls around attention; a prefill step a few more.

A layer of the common shape (norm, attention, norm, SwiGLU MLP, each half added to the residual stream) whose weights
oneDNN laid out in panels gets a second forward. Only steps of the paged lane use it, and only if its output equals that
of the layer's own forward on random input.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graftlm.core.execution.cache_name import cache_in
from graftlm.core.execution.paged import (
    AttentionCall,
    AttentionSwitch,
    OutputTokens,
    Step,
    output_tokens_after,
    step_at_hand,
)
from graftlm.core.execution.routing import is_replayed
from graftlm.core.fusion.cpu_mixtures import fuse_mixtures
from graftlm.core.fusion.layer_parts import LayerModules, allclose, decoder_stacks
from graftlm.core.fusion.layer_probe import ROUTED_TRIES, LayerProbe, causal
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.amx import HAS_TILES
from graftlm.kernels.cpu.calls import INT8_ROWS
from graftlm.kernels.cpu.linear.packed_codes import PackedCodes
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.cpu.linear.packed_pieces import PackedPieces
from graftlm.kernels.cpu.linear.panels import AnyPanels
from graftlm.kernels.norm import Norm
from graftlm.kernels.weight import PlainWeight, weight_of

if TYPE_CHECKING:
    from graftlm.core.fusion.linears import Fusions
    from graftlm.kernels.cpu.decoder.decoder_layer import BlockLayer, DecodeLayer, LayerWeights, PrefillLayer
    from graftlm.kernels.cpu.decoder.dot_layer import DotLayer
    from graftlm.kernels.cpu.decoder.mixture import CompiledExperts
    from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear

log = logging.getLogger("graftlm.engine")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error between a layer and its replacement on random input."""
_PROBED = (1, 7)
"""Lengths of the random inputs, in tokens."""
_PACKED = (PackedLinear, PackedPieces, PackedCodes)
_NO_NUMBA = "numba, which compiles the CPU kernels, is not installed"
_BLOCK = 256
"""Tokens that run through a layer's MLP together: its matmuls are no faster with more."""
_TILE_BLOCK = 1024
"""Tokens that run through a layer's MLP together with AMX tiles, for which each block lays the weights out anew."""


class FusedCpuLayer(NamedTuple):
    """The replacement of a layer's forward; `original` runs all calls that are not steps of the paged lane.

    decode   runs steps of up to `max_rows` tokens; `blocks` steps of some hundred, if given; `prefill` longer steps
    mixture  the module of a layer's mixture, which runs itself where its choice of experts is replayed
    """

    decode: DecodeLayer
    blocks: BlockLayer | None
    prefill: PrefillLayer | DotLayer
    attention: nn.Module
    params: AttentionParams
    original: Callable[..., Any]
    max_rows: int
    mixture: nn.Module | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        step, embeddings = step_at_hand(), options.get("position_embeddings")
        plain = not args and options.get("attention_mask") is None and cache_in(options) is None
        if step is None or embeddings is None or not plain or not self._takes(hidden_states, *embeddings):
            return self.original(hidden_states, *args, **options)
        cos, sin = embeddings
        return self.run(hidden_states[0].contiguous(), cos[0], sin[0], step, output_tokens_after(self.attention))[None]

    def _takes(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Return True if the arguments are the tokens of one ragged batch, with a rotation for each."""
        one, num_rows, _ = hidden_states.shape
        if one != 1 or not hidden_states.dtype == cos.dtype == self.decode.layers.dtype:
            return False
        return cos.shape[:2] == (1, num_rows) and cos.stride() == sin.stride() and cos.stride(2) == 1

    def run(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step, wanted: OutputTokens | None = None
    ) -> torch.Tensor:
        """Run the layer on x [num_rows, hidden_size], in place. -> x; only the `wanted` rows are valid, if given"""
        q, k, v = (part.transpose(0, 1)[None] for part in self._part(x, x.shape[0]).before(x, cos, sin))
        tokens = wanted.tokens if wanted is not None else None
        attended = step(AttentionCall(self.attention, q, k, v, self.params, tokens)).contiguous()
        if wanted is None:
            self._finish(x, attended)
            return x
        part = x.index_select(0, wanted.tokens)
        self._finish(part, attended)
        return x.index_copy_(0, wanted.tokens, part)

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Run the layer after its attention in blocks: memory stays small, and oneDNN compiles for few row counts."""
        block = _TILE_BLOCK if HAS_TILES and x.dtype is torch.bfloat16 else _BLOCK
        if self.mixture is not None:
            block = _TILE_BLOCK  # so that an expert has rows enough
            if is_replayed():
                x += self.mixture(self.prefill.add_attended(x, attended)[None, : x.shape[0]])[0]
                return
        for first in range(0, x.shape[0], block):
            here = slice(first, first + block)
            self._part(x[here], x.shape[0]).after(x[here], attended[here])

    def _part(self, x: torch.Tensor, num_rows: int) -> DecodeLayer | BlockLayer | PrefillLayer | DotLayer:
        """Return the layer for x, which is all or a part of `num_rows` tokens."""
        if x.shape[0] <= self.max_rows:
            return self.decode
        return self.blocks if self.blocks is not None and self.blocks.takes(num_rows) else self.prefill


@torch.inference_mode()
def fuse_cpu(model: nn.Module, fusions: Fusions) -> int:
    """Replace the forward of layers of the common shape, and of the head for few rows; note why layers are not fused.

    -> number of layers replaced
    """
    dtype = next(model.parameters()).dtype
    if dtype not in TOLERANCE:
        fusions.unfused.append(f"there are no CPU kernels for {str(dtype).removeprefix('torch.')}")
        return 0
    if importlib.util.find_spec("numba") is None:
        fusions.unfused.append(_NO_NUMBA)
        _warn_without_numba()
        return 0
    switch = AttentionSwitch(model)
    mixtures = fuse_mixtures(model, fusions)
    found: list[_Found] = []
    refused: dict[str, list[int]] = {}  # reason -> indices of the layers
    for layers, rotary in decoder_stacks(model):
        for number, layer in enumerate(layers):
            parts = _parts_of(layer, rotary, switch, mixtures, compared=not fusions.trusted)
            if isinstance(parts, str):
                refused.setdefault(parts, []).append(number)
            else:
                found.append(_Found(number, layer, *parts))
    _fuse_head(model, fusions)
    if found:
        _install(found, fusions, refused)
    fusions.unfused += [f"{_numbered(numbers)}: {why}" for why, numbers in refused.items()]
    return fusions.num_fused


@functools.cache
def _warn_without_numba() -> None:
    log.warning("%s: models run by PyTorch's kernels, several times as slowly; pip install numba", _NO_NUMBA)


class _Found(NamedTuple):
    """A layer whose weights the compiled code can read.

    again  makes another probe
    """

    number: int
    layer: nn.Module
    probe: LayerProbe
    weights: LayerWeights
    again: Callable[[], LayerProbe | None]


def _parts_of(
    layer: nn.Module,
    rotary: nn.Module,
    switch: AttentionSwitch,
    mixtures: dict[nn.Module, CompiledExperts],
    *,
    compared: bool,
) -> tuple[LayerProbe, LayerWeights, Callable[[], LayerProbe | None]] | str:
    """Return a layer's probe, weights and maker of probes; or the reason why the compiled code cannot compute it."""
    modules = LayerModules.of(layer)
    if isinstance(modules, str):
        return modules
    if not modules.qkv:
        return "projections of other names" if modules.attends else "a module with a state"
    like = getattr(modules.before_attention, "weight", None)
    if not isinstance(like, torch.Tensor) or Norm.of(modules.before_attention) is None:
        return "no RMSNorm before its attention"
    num_tokens = max(_PROBED) if compared else 1
    again = partial(LayerProbe.of, layer, rotary, like, num_tokens, switch, compared=compared)
    try:
        probe = again()
    except Exception as error:  # its arguments or outputs differ: it keeps its own forward
        return f"it does not run by itself ({type(error).__name__})"
    if probe is None:
        return "it does not attend exactly once"
    if probe.num_others is not None:
        return "it returns more than its output"
    weights = weights_of(modules, probe.call, mixtures.get(modules.mlp))
    return weights if isinstance(weights, str) else (probe, weights, again)


def _numbered(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    return f"layers {', '.join(map(str, numbers[:3]))}" + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")


def skinny_head(model: nn.Module) -> SkinnyLinear | None:
    """Return the head for few rows, whose loop reads weights at memory speed; None if the head is not packed."""
    from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear

    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    is_packed = isinstance(head, _PACKED)
    if not (is_packed or type(weight_of(head)) is PlainWeight) or _dtype_of(head) not in TOLERANCE:
        return None
    pieces = head.panels() if isinstance(head, PackedPieces) else _panels((head,))
    if pieces is not None:
        return SkinnyLinear(pieces, None, _dtype_of(head))
    if isinstance(head, PackedPieces | PackedCodes) or (isinstance(head, PackedLinear) and not head.in_place):
        return None
    if not SkinnyLinear.fits(head.weight):
        return None
    bias = head.bias.detach() if head.bias is not None else None
    return SkinnyLinear(head.weight.detach(), bias, _dtype_of(head))


def _dtype_of(linear: nn.Linear) -> torch.dtype:
    return linear.dtype if isinstance(linear, _PACKED) else linear.weight.dtype


def _fuse_head(model: nn.Module, fusions: Fusions) -> None:
    from graftlm.kernels.cpu.decoder.decoder_layer import MAX_DECODE_ROWS, MAX_QUANTISED_ROWS

    linear = skinny_head(model)
    if linear is None:
        return
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    dtype, original = _dtype_of(head), head.forward
    max_rows = MAX_QUANTISED_ROWS if isinstance(head, PackedCodes) else MAX_DECODE_ROWS[dtype]

    def forward(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // x.shape[-1]
        if not 0 < num_rows <= max_rows:
            out: torch.Tensor = original(x)
            return out
        return linear(x.reshape(num_rows, -1)).view(*x.shape[:-1], -1)

    def same() -> bool:
        probe = torch.randn(1, max(_PROBED), head.in_features, dtype=torch.float32).to(dtype)
        return all(allclose(original(probe[:, :n]), forward(probe[:, :n]), TOLERANCE[dtype]) for n in _PROBED)

    if fusions.passes(same):
        head.forward = forward
        fusions.add(partial(delattr, head, "forward"))


def _install(found: list[_Found], fusions: Fusions, refused: dict[str, list[int]]) -> None:
    from graftlm.kernels.cpu.decoder.decoder_layer import BlockLayer, CompiledLayers, DecodeLayer, PrefillLayer
    from graftlm.kernels.cpu.decoder.dot_layer import DotLayer
    from graftlm.kernels.cpu.decoder.elementwise import Elementwise

    loops = Elementwise(found[0].probe.hidden.dtype)
    compiled = CompiledLayers([one.weights for one in found])
    for index, (number, layer, probe, weights, again) in enumerate(found):
        decode = DecodeLayer(compiled, index)
        prefill = DotLayer(decode, loops) if DotLayer.fits(decode) else PrefillLayer(weights, loops)
        parts = decode, BlockLayer(decode), prefill
        modules = LayerModules.of(layer)
        mixture = modules.mlp if weights.mixture is not None and not isinstance(modules, str) else None
        module, params = probe.call.module, probe.call.params
        fused = FusedCpuLayer(*parts, module, params, layer.forward, compiled.space.num_rows, mixture)
        if fusions.passes(partial(_agrees, probe, fused, again)):
            setattr(layer, "forward", fused)  # noqa: B010
            fusions.add(partial(delattr, layer, "forward"))
            fusions.num_fused += 1
        else:
            refused.setdefault("it computes something else between its modules", []).append(number)


def weights_of(
    modules: LayerModules, call: AttentionCall, mixture: CompiledExperts | None = None
) -> LayerWeights | str:
    """Return the weights of a layer, or the reason why the compiled code cannot compute it.

    call  the arguments with which the layer called its attention; mixture  of the layer, if it has one
    """
    from graftlm.kernels.cpu.decoder.decoder_layer import LayerWeights

    own = (
        *(modules.before_attention, modules.before_mlp, modules.q_norm, modules.k_norm),
        *(modules.after_attention, modules.after_mlp),
    )
    norms = [rms_norm_of(module) for module in own]
    before, after, q_norm, k_norm, after_attention, after_mlp = norms
    absent = [module is None or type(module) is nn.Identity for module in own]
    known = absent == [norm is None for norm in norms]
    if before is None or after is None or not known:
        return "its norms are no RMSNorms before attention and MLP"
    if modules.factor != 1.0:
        return f"a factor of {modules.factor:g} on what it adds"
    if mixture is None and (modules.activation is None or modules.down is None):
        return "its MLP is not down(silu(gate) * up), or with GELU"
    dense = (modules.gate_up, (modules.down,)) if mixture is None and modules.down is not None else ((), ())
    of_parts: tuple[tuple[nn.Module, ...], ...] = (modules.qkv, (modules.out,), *dense)
    parts = [_panels(linears) for linears in of_parts]
    for linears, panels in zip(of_parts, parts, strict=True):
        if panels is None:
            return f"a weight of shape {_shapes(linears)} that is not packed in panels"
    qkv, out, gate_up, down = (part or [] for part in parts)
    num_heads, num_kv_heads, dim = call.q.shape[1], call.k.shape[1], call.q.shape[3]
    weights = LayerWeights(
        before, qkv, q_norm, k_norm, out[0], after, gate_up, down[0] if down else None, num_heads, num_kv_heads, dim,
        modules.activation or "silu", after_attention, after_mlp, mixture,
    )  # fmt: skip
    return weights.problem() or weights


def rms_norm_of(module: nn.Module | None) -> Norm | None:
    """Return the RMSNorm of a module in the form of the compiled code; None if it is of another kind."""
    norm = Norm.of(module)
    if norm is None or norm.centered or norm.bias is not None:
        return None
    if norm.rounded:
        return norm
    dtype = next(iter(module.parameters())).dtype if module is not None else torch.float32
    # in float32 there is nothing to round, so that both forms are one
    return norm._replace(weight=norm.weight.float(), rounded=dtype is torch.float32)


def _shapes(modules: tuple[nn.Module, ...]) -> str:
    shapes = {f"{getattr(m, 'out_features', '?')} x {getattr(m, 'in_features', '?')}" for m in modules}
    return " or ".join(sorted(shapes))


def _panels(modules: tuple[nn.Module, ...]) -> list[AnyPanels] | None:
    """Return the weights of linear layers in panels; None if one is not in panels."""
    found = [module.panels() if isinstance(module, PackedLinear | PackedCodes) else None for module in modules]
    panels = [p for p in found if p is not None]
    return panels if len(panels) == len(found) else None


def _agrees(probe: LayerProbe, fused: FusedCpuLayer, again: Callable[[], LayerProbe | None]) -> bool:
    """Return True if a fused layer computes what the layer's own forward does, for a mixture on one of several probes.

    Rounding may send most of the few tokens of a probe to other experts, which an error does to those of all probes.
    """
    tries = ROUTED_TRIES - 1 if fused.mixture is not None else 0
    probes = itertools.chain([probe], (again() for _ in range(tries)))
    return any(one is not None and _same_in_all_forms(one, fused) for one in probes)


def _same_in_all_forms(probe: LayerProbe, fused: FusedCpuLayer) -> bool:
    """Return True if steps of few tokens, of blocks and of many compute what the layer's own forward does."""
    others = [fused._replace(max_rows=0), fused._replace(max_rows=0, blocks=None)]
    return all(_same(probe.first(n), fused) for n in _PROBED) and all(_same(probe, other) for other in others)


def _same(probe: LayerProbe, fused: FusedCpuLayer) -> bool:
    """Return True if the fused layer computes equal queries, keys, values and output, for all tokens and for some."""
    calls: list[AttentionCall] = []

    def step(call: AttentionCall) -> torch.Tensor:
        calls.append(call._replace(q=call.q.clone(), k=call.k.clone(), v=call.v.clone()))
        attended = causal(call.q, call.k, call.v, call.params.scale)
        return attended if call.tokens is None else attended.index_select(0, call.tokens)

    out = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step)
    (call,) = calls
    wanted = OutputTokens(fused.attention, torch.arange(0, out.shape[0], 3), last_token_only=False)
    part = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step, wanted)
    pairs = [(probe.call.q, call.q), (probe.call.k, call.k), (probe.call.v, call.v), (probe.expected[0], out)]
    pairs += [(probe.expected[0, wanted.tokens], part[wanted.tokens])]
    rounds = any(panels.forms & INT8_ROWS for panels in fused.decode.weights.all_panels)
    tolerance = TOLERANCE[torch.bfloat16 if rounds else call.q.dtype]
    if fused.mixture is None or tolerance == TOLERANCE[torch.float32]:
        return all(allclose(old, new, tolerance) for old, new in pairs)
    agree = _mostly if len(out) > 1 else lambda old, new, tolerance: True
    return all(allclose(old, new, tolerance) for old, new in pairs[:3]) and agree(probe.expected[0], out, tolerance)


def _mostly(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> bool:
    """Return True if most tokens agree: rounding may send one to another expert."""
    same = [allclose(old, new, tolerance) for old, new in zip(expected, found, strict=True)]
    return sum(same) > len(same) // 2
