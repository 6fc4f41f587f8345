"""Whole decoder layers on a CPU: in steps of few tokens two compiled calls around their attention, in others few more.

A layer of the common shape (norm, attention, norm, gated MLP, each half added to its input) whose weights oneDNN laid
out in panels gets this beside its own forward. It is used in steps of the paged lane only, and only if the layer gave
the same on random input.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graftlm.core.execution.paged import (
    AttentionCall,
    AttentionSwitch,
    OutputTokens,
    Step,
    output_tokens_after,
    step_at_hand,
)
from graftlm.core.fusion.layer_probe import LayerProbe, causal
from graftlm.kernels.attention_params import AttentionParams
from graftlm.kernels.cpu.packed_linear import PackedLinear, Panels

if TYPE_CHECKING:
    from graftlm.core.fusion.linears import Fusions
    from graftlm.kernels.cpu.decoder_layer import LayerWeights, RowLayer
    from graftlm.kernels.cpu.wide_layer import WideLayer

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error between a layer and its equal on random input."""
_PROBED = (1, 7)
"""Tokens of the random inputs."""
_BLOCK = 256
"""Tokens that run through a layer's MLP together: enough for its products."""


class FusedCpuLayer(NamedTuple):
    """Takes the place of a layer's forward; `original` runs whatever is not a step of the paged lane.

    rows  runs up to `max_rows` tokens, `wide` runs more
    """

    rows: RowLayer
    wide: WideLayer
    attention: nn.Module
    params: AttentionParams
    original: Callable[..., Any]
    max_rows: int

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        step, embeddings = step_at_hand(), options.get("position_embeddings")
        plain = not args and options.get("attention_mask") is None and options.get("past_key_values") is None
        if step is None or embeddings is None or not plain or not self._takes(hidden_states, *embeddings):
            return self.original(hidden_states, *args, **options)
        cos, sin = embeddings
        return self.run(hidden_states[0].contiguous(), cos[0], sin[0], step, output_tokens_after(self.attention))[None]

    def _takes(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether these are the tokens of one ragged batch, with rotations for each."""
        one, num_rows, _ = hidden_states.shape
        if one != 1 or not hidden_states.dtype == cos.dtype == self.rows.dtype:
            return False
        return cos.shape[:2] == (1, num_rows) and cos.stride() == sin.stride() and cos.stride(2) == 1

    def run(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: Step, wanted: OutputTokens | None = None
    ) -> torch.Tensor:
        """Run the layer on x [num_rows, hidden_size], overwriting it. -> x, of which only `wanted` means anything."""
        q, k, v = (part.transpose(0, 1)[None] for part in self._half(x).before(x, cos, sin))
        attended = step(AttentionCall(self.attention, q, k, v, self.params)).contiguous()
        if wanted is None:
            self._finish(x, attended)
            return x
        part = x.index_select(0, wanted.tokens)
        self._finish(part, attended.index_select(0, wanted.tokens))
        return x.index_copy_(0, wanted.tokens, part)

    def _finish(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """What follows the attention, block by block: work space stays small, and products see few numbers of rows."""
        for first in range(0, x.shape[0], _BLOCK):
            here = slice(first, first + _BLOCK)
            self._half(x[here]).after(x[here], attended[here])

    def _half(self, x: torch.Tensor) -> RowLayer | WideLayer:
        return self.rows if x.shape[0] <= self.max_rows else self.wide


@torch.inference_mode()
def fuse_cpu(model: nn.Module, fusions: Fusions) -> int:
    """Give layers of the common shape a compiled forward, and the head one for few rows. -> how many layers got one."""
    if importlib.util.find_spec("numba") is None or next(model.parameters()).dtype not in TOLERANCE:
        return 0
    switch = AttentionSwitch(model)
    found: list[tuple[nn.Module, LayerProbe, LayerWeights]] = []
    for owner in list(model.modules()):
        layers, rotary = getattr(owner, "layers", None), getattr(owner, "rotary_emb", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(rotary, nn.Module):
            continue
        for layer in layers:
            norm = _norm(layer, "input_layernorm")
            if norm is None:
                continue
            try:
                probe = LayerProbe.of(layer, rotary, norm.weight, max(_PROBED), switch)
            except Exception:  # it takes or gives something else: it keeps its own forward
                continue
            weights = weights_of(layer, probe.call) if probe is not None else None
            if probe is not None and weights is not None:
                found.append((layer, probe, weights))
    _fuse_head(model, fusions)
    return _install(found, fusions) if found else 0


def _fuse_head(model: nn.Module, fusions: Fusions) -> None:
    """Read the weights of the logits as fast as the memory gives them, for few rows."""
    from graftlm.kernels.cpu.decoder_layer import MAX_ROWS, RowProduct

    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) not in (nn.Linear, PackedLinear) or head.weight.dtype not in TOLERANCE:
        return
    weight = head.panels() if isinstance(head, PackedLinear) else None
    if weight is None and isinstance(head, PackedLinear) and not head.in_place:
        return
    if weight is None and not RowProduct.fits(head.weight):
        return
    bias = head.bias.detach() if head.bias is not None else None
    product = RowProduct(weight or head.weight.detach(), bias, head.weight.dtype)
    original = head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // x.shape[-1]
        if not 0 < num_rows <= max_rows:
            out: torch.Tensor = original(x)
            return out
        return product(x.reshape(num_rows, -1)).view(*x.shape[:-1], -1)

    max_rows = MAX_ROWS[head.weight.dtype]
    probe = torch.randn(1, max(_PROBED), head.in_features).to(head.weight.dtype)
    if all(_agree(original(probe[:, :n]), forward(probe[:, :n])) for n in _PROBED):
        head.forward = forward
        fusions.add(partial(delattr, head, "forward"))


def _install(found: list[tuple[nn.Module, LayerProbe, LayerWeights]], fusions: Fusions) -> int:
    from graftlm.kernels.cpu.decoder_layer import RowLayer, WorkSpace
    from graftlm.kernels.cpu.elementwise import Elementwise
    from graftlm.kernels.cpu.wide_layer import WideLayer

    loops = Elementwise(found[0][1].hidden.dtype)
    space = WorkSpace([weights for *_, weights in found])
    num_fused = 0
    for layer, probe, weights in found:
        halves = RowLayer(weights, space), WideLayer(weights, loops)
        fused = FusedCpuLayer(*halves, probe.call.module, probe.call.params, layer.forward, space.num_rows)
        if all(_same(probe.first(n), fused) for n in _PROBED) and _same(probe, fused._replace(max_rows=0)):
            setattr(layer, "forward", fused)  # noqa: B010
            fusions.add(partial(delattr, layer, "forward"))
            num_fused += 1
    return num_fused


def weights_of(layer: nn.Module, call: AttentionCall) -> LayerWeights | None:
    """What `layer` computes with, if it has the common shape; `call` is how it called its attention."""
    from graftlm.kernels.cpu.decoder_layer import LayerWeights

    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    before, after = _norm(layer, "input_layernorm"), _norm(layer, "post_attention_layernorm")
    qkv = _panels(attention, "q_proj", "k_proj", "v_proj") or _panels(attention, "qkv_proj")
    gate_up = _panels(mlp, "gate_proj", "up_proj") or _panels(mlp, "gate_up_proj")
    out, down = _panels(attention, "o_proj"), _panels(mlp, "down_proj")
    activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    gated = isinstance(activation, nn.SiLU) or "silu" in type(activation).__name__.lower()
    if before is None or after is None or not (qkv and gate_up and out and down and gated):
        return None
    num_heads, num_kv_heads, dim = call.q.shape[1], call.k.shape[1], call.q.shape[3]
    q_norm, k_norm = _norm(attention, "q_norm"), _norm(attention, "k_norm")
    weights = LayerWeights(before, qkv, q_norm, k_norm, out[0], after, gate_up, down[0], num_heads, num_kv_heads, dim)
    return weights if weights.problem() is None else None


def _norm(owner: Any, name: str) -> Any:
    from graftlm.kernels.cpu.decoder_layer import Norm

    module = getattr(owner, name, None)
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or eps is None:
        return None
    return Norm(weight.detach(), float(eps))  # addresses are taken of it: it outlives a change of the parameter


def _panels(owner: Any, *names: str) -> list[Panels] | None:
    """The weights of these linear layers; None if one is missing or lies otherwise."""
    found = []
    for name in names:
        module = getattr(owner, name, None)
        panels = module.panels() if isinstance(module, PackedLinear) else None
        if panels is None:
            return None
        found.append(panels)
    return found


def _same(probe: LayerProbe, fused: FusedCpuLayer) -> bool:
    """Whether the fused layer gives this output, by way of these queries, keys and values; all of it and a part."""
    calls: list[AttentionCall] = []

    def step(call: AttentionCall) -> torch.Tensor:
        calls.append(call._replace(q=call.q.clone(), k=call.k.clone(), v=call.v.clone()))
        return causal(call.q, call.k, call.v, call.params.scale)

    out = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step)
    (call,) = calls
    wanted = OutputTokens(fused.attention, torch.arange(0, out.shape[0], 3), last_token_only=False)
    part = fused.run(probe.hidden[0].clone(), probe.cos[0], probe.sin[0], step, wanted)
    pairs = [(probe.call.q, call.q), (probe.call.k, call.k), (probe.call.v, call.v), (probe.expected[0], out)]
    pairs += [(probe.expected[0, wanted.tokens], part[wanted.tokens])]
    return all(_agree(old, new) for old, new in pairs)


def _agree(old: torch.Tensor, new: torch.Tensor) -> bool:
    error = (new.float() - old.float()).norm() / old.float().norm().clamp_min(1e-30)
    return old.shape == new.shape and bool(error < TOLERANCE[old.dtype])
