"""Fusions for GPUs: parallel projections as one matmul, norm, activation and rotary embedding as one kernel each,
and whole layers on top of these (gpu_layers.py).

Each replacement is compared with its original on random input and dropped if they differ, so a model with other
arithmetic under the same names keeps its own modules. Linear layers are the modules whose weight has a format
(kernels/weight.py); all other modules keep their forward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.fusion.gpu_encoders import AlignedMlp, fuse_encoders
from graftlm.core.fusion.gpu_layers import fuse_layers
from graftlm.core.fusion.layer_parts import Product, Recognised, activation_of, allclose, keys_are_values
from graftlm.core.fusion.linears import Fusions
from graftlm.core.fusion.mixtures import fuse_mixtures
from graftlm.core.fusion.rotary import RotaryPatch, fuse_rotary_tables
from graftlm.core.state_layers.state_layers import FAMILIES
from graftlm.core.tensor_parallel.ranks import REDUCE
from graftlm.kernels.activation import Activation
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.codes.tiled_weight import TiledParts, TiledWeight, tiled
from graftlm.kernels.gpu.elementwise import gate_mul, rotate
from graftlm.kernels.gpu.linear.batch_invariant_matmul import FixedProduct
from graftlm.kernels.gpu.norm import norm_rows
from graftlm.kernels.linear_dispatch import AllClose, Linear, LinearPlan, max_rows_of, plan
from graftlm.kernels.linear_kernels import Role
from graftlm.kernels.norm import Norm
from graftlm.kernels.quantised_modules import QuantisedLinear
from graftlm.kernels.weight import PlainWeight, Weight, held_as, hold_as, put_weight, weight_of

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Relative error between a module and its replacement on random input; half precision rounds once more or less."""


def fuse_gpu(
    model: nn.Module, *, max_rows: int | None = None, strict: bool = False, fp8: bool = False, dry: bool = False
) -> Fusions:
    """Replace modules of `model` by faster equivalents on a GPU; packing holds one layer's weights in memory twice.

    max_rows  the largest number of rows for kernels of few rows; None takes the measured rule.
    strict    the result of a linear layer for a row does not depend on the batch, to the bit.
    fp8       steps of many rows multiply weights in E4M3 with activations that are rounded to it too.
    dry       accept every replacement without comparison, to launch its kernels; `model` is unusable afterwards. Parts
              that it shares with other models of its kind stay unchanged.
    """
    fusions = Fusions()
    for module in model.modules():
        if held_as(module) is not PlainWeight:
            fusions.add(partial(hold_as, module, None))
    first = next(model.parameters())
    linear = FixedProduct(first.device, first.dtype) if strict else None
    work = _Work(fusions, Recognised({}, {}), linear, _same_shape if dry else _agree, fp8, max_rows)
    with torch.no_grad():
        if linear is not None:
            _fix_linears(model, linear, fusions)
        fuse_mixtures(model, work.found.mixtures, fusions, work.agree, strict=strict, dry=dry)
        fuse_encoders(model, fusions, work.agree, strict=strict, dry=dry)
        for module in list(model.modules()):
            if isinstance(vars(module).get("forward"), AlignedMlp):
                continue
            inputs = (_QKK if keys_are_values(module) else _QKV, *_STATE_PROJECTIONS)
            packed = any(_pack_inputs(module, names, work) for names in inputs)
            if not packed and not _pack_gate_up(module, work) and not _plan_state_input(module, work):
                _fuse_norm(module, work)
        _tile_linears(model, work)
        fuse_rotary_tables(model, fusions, dry=dry)
        _fuse_rotary(model, work, dry=dry)
        fuse_layers(model, work.found, fusions, work.agree, max_rows=max_rows, linear=linear)
        _fuse_head(model, work)
    return fusions


@dataclass(frozen=True)
class _Work:
    """The state of a fusion: replaced and recognised modules, the linear function, and the test of equality."""

    fusions: Fusions
    found: Recognised
    linear: Linear | None
    agree: AllClose
    fp8: bool
    max_rows: int | None = None


_QKV, _QKK = ("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj", "k_proj")
"""Names of the projections of attention; of one whose keys are its values, which are multiplied twice then."""
_STATE_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Names of the projections of one input: of attention, and of modules with a state."""


def _fix_linears(model: nn.Module, linear: Linear, fusions: Fusions) -> None:
    """Run every linear layer through `linear`."""
    for module in model.modules():
        if weight_of(module) is not None:
            setattr(module, "forward", partial(_through, module, linear))  # noqa: B010
            fusions.add(partial(delattr, module, "forward"))


def _through(module: nn.Module, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    weight = weight_of(module)  # read at each call: a reference kept here would keep the unpacked weight alive
    assert weight is not None
    return linear(x, weight.dense(), _bias_of(module))


def _bias_of(module: nn.Module) -> torch.Tensor | None:
    bias: torch.Tensor | None = module.bias  # type: ignore[assignment]
    return bias


class PackedProjections(nn.Module):
    """Several linear layers of one input as one matmul.

    The outputs of the later layers are held, for each thread, until `part` has returned the last: with 8,192 tokens
    they are hundreds of megabytes a layer.
    """

    def __init__(
        self,
        linears: Sequence[nn.Module],
        work: _Work | None = None,
        *,
        gates: Activation | None = None,
        by_itself: bool = False,
    ) -> None:
        """Concatenate the weights of `linears`. Raises ValueError if their formats do not allow it.

        gates      the activation of the first of two
        by_itself  whether no fused layer will multiply the weight
        """
        super().__init__()
        self.gates = gates
        self.linear = (work.linear if work is not None else None) or nn.functional.linear
        first, *others = [weight for module in linears if (weight := weight_of(module)) is not None]
        self.sizes = [weight.shape[0] for weight in (first, *others)]
        weight = first.concat(others)
        if isinstance(weight, PlainWeight):
            self.weight = nn.Parameter(weight.values, requires_grad=False)
            weight = replace(weight, values=self.weight)
        elif any(isinstance(module, QuantisedLinear) for module in linears):
            weight = _tiled(weight, gates=gates is not None, fp8=work is not None and work.fp8)
        biases = [bias for module in linears if (bias := _bias_of(module)) is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.product = Product(weight, self.bias)
        role: Role = "gate_up" if gates is not None else "qkv"
        self.plan: LinearPlan | None = None
        if work is not None:
            self.plan = _plan_of(weight, role, self.bias, work, gates or "silu", by_itself=by_itself)
        self.held: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = {}

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of all layers, side by side."""
        if self.plan is not None and self.gates is None:
            return self.plan.matmul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return self.linear(x, self.product.weight.dense(), self.bias)

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the outputs of all layers, each by itself."""
        return tuple(torch.split(self.packed(x), self.sizes, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.outputs(x)
        self.held[threading.get_ident()] = x, outputs
        return outputs[0]

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of layer `index`; compute it if `x` is not the input of this thread's last forward."""
        source, outputs = self.held.get(threading.get_ident(), (None, ()))
        if source is not x:
            return self.outputs(x)[index]
        if index == len(self.sizes) - 1:
            del self.held[threading.get_ident()]
        return outputs[index]

    def unpack(self, linears: Sequence[nn.Module]) -> None:
        """Restore the layers' weights, as views of the packed one."""
        weights = self.product.weight.split(self.sizes)
        biases = self.bias.split(self.sizes) if self.bias is not None else [None] * len(linears)
        for linear, weight, bias in zip(linears, weights, biases, strict=True):
            put_weight(linear, weight)
            if bias is not None:
                linear.bias = nn.Parameter(bias, requires_grad=False)


class PackedPart(nn.Module):
    """One of the later layers of a PackedProjections."""

    def __init__(self, packed: PackedProjections, index: int) -> None:
        super().__init__()
        self.packed = [packed]  # in a list, so that it is not a submodule twice
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed[0].part(self.index, x)


def _packable(module: nn.Module, names: tuple[str, ...]) -> tuple[list[nn.Module], Weight] | None:
    """Return the children of these names and the weight of the first, if all are linear layers alike."""
    linears = [child for name in names if isinstance(child := getattr(module, name, None), nn.Module)]
    weights = [weight for child in linears if (weight := weight_of(child)) is not None]
    if len(weights) != len(names):
        return None
    kinds = {
        (type(weight), weight.shape[1], weight.dtype, _bias_of(child) is None)
        for child, weight in zip(linears, weights, strict=True)
    }
    return (linears, weights[0]) if len(kinds) == 1 else None


def _pack(linears: list[nn.Module], work: _Work, **options: Any) -> PackedProjections | None:
    try:
        return PackedProjections(linears, work, **options)
    except ValueError:  # their formats have no concatenation
        return None


def _tiled(weight: Weight, *, gates: bool, fp8: bool) -> TiledWeight | TiledParts:
    found = tiled(weight, gates=gates, fp8=fp8)
    if found is None:
        raise ValueError("no kernel multiplies weights of this format together")
    return found


def _plan_of(
    weight: Weight,
    role: Role,
    bias: torch.Tensor | None,
    work: _Work,
    activation: Activation = "silu",
    *,
    by_itself: bool = False,
) -> LinearPlan | None:
    """Return the kernels of a tiled weight, or one that no fused layer multiplies; None for any other weight."""
    if work.linear is not None or not (by_itself or isinstance(weight, TiledWeight | TiledParts)):
        return None
    return plan(weight, role, bias, agree=work.agree, max_rows=work.max_rows, activation=activation)


def _plan_state_input(module: nn.Module, work: _Work) -> bool:
    """Choose kernels for the only input projection of a module with a state. -> whether it has one"""
    linear = getattr(module, "in_proj", None)
    if type(module).__name__ not in FAMILIES or not isinstance(linear, nn.Module):
        return False
    return _plan_by_itself(linear, "qkv", work)


def _plan_by_itself(linear: nn.Module, role: Role, work: _Work) -> bool:
    """Choose kernels for a linear layer that no fused layer multiplies. -> False for another kind of module"""
    weight = weight_of(linear)
    if weight is None or isinstance(linear, QuantisedLinear):
        return False
    chosen = _plan_of(weight, role, _bias_of(linear), work, by_itself=True)
    if chosen is not None and chosen.chosen:
        setattr(linear, "forward", partial(_multiplied, chosen))  # noqa: B010, compared by the plan
        work.fusions.add(partial(delattr, linear, "forward"))
        work.fusions.num_compact += chosen.reads(Bits12Weight)
    return True


def _tile_linears(model: nn.Module, work: _Work) -> None:
    """Give the remaining linear layers with quantised weights tiles, and a forward that multiplies these."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, QuantisedLinear) or module.quantised is None:
            continue
        weight = module.quantised
        gates = name.endswith("gate_up_proj")
        found = weight if isinstance(weight, TiledWeight | TiledParts) else tiled(weight, gates=gates, fp8=work.fp8)
        if found is None:
            continue
        module.quantised = found
        chosen = _plan_of(found, "qkv", _bias_of(module), work) if not gates else None
        if chosen is not None and chosen.chosen:
            setattr(module, "forward", partial(_multiplied, chosen))  # noqa: B010, compared by the plan
            work.fusions.add(partial(delattr, module, "forward"))


def _multiplied(chosen: LinearPlan, x: torch.Tensor) -> torch.Tensor:
    return chosen.matmul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def _pack_inputs(module: nn.Module, names: tuple[str, ...], work: _Work) -> bool:
    found = _packable(module, names)
    packed = _pack(found[0], work, by_itself=names not in (_QKV, _QKK)) if found is not None else None
    if found is None or packed is None:
        return False
    linears, weight = found
    probe = _probe(weight)
    old = [linear(probe) for linear in linears]
    if not all(work.agree(a, b) for a, b in zip(old, packed.outputs(probe), strict=True)):
        return False
    _release(linears)
    for index, name in enumerate(names):
        setattr(module, name, packed if index == 0 else PackedPart(packed, index))
    work.fusions.add(partial(_restore, module, tuple(zip(names, linears, strict=True)), packed), weights=True)
    work.fusions.num_packed += 1
    work.fusions.num_compact += packed.plan is not None and packed.plan.reads(Bits12Weight)
    work.found.products[module] = packed.product
    return True


def _pack_gate_up(module: nn.Module, work: _Work) -> bool:
    found = _packable(module, ("gate_proj", "up_proj"))
    down, activation = getattr(module, "down_proj", None), getattr(module, "act_fn", None)
    if found is None or not isinstance(down, nn.Module) or activation is None:
        return False
    linears, weight = found
    kind = activation_of(activation)
    shared = any(mixture.shared_experts is module for mixture in work.found.mixtures.values())
    packed = _pack(linears, work, gates=kind, by_itself=shared and kind is not None)
    if packed is None:
        return False
    if shared and not hasattr(down, REDUCE):
        _plan_by_itself(down, "head", work)  # whose kernels sum the few inputs at once
    width = weight.shape[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        if packed.plan is not None and packed.gates is not None:
            gated: torch.Tensor = down(packed.plan.gate_up(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1))
            return gated
        both = packed.packed(x)
        hidden = gate_mul(both, kind) if kind is not None else activation(both[..., :width]) * both[..., width:]
        out: torch.Tensor = down(hidden)
        return out

    if not _replace_forward(module, forward, _probe(weight), work):
        return False
    _release(linears)
    work.fusions.add(partial(packed.unpack, linears), weights=True)
    work.fusions.num_packed += 1
    work.fusions.num_compact += packed.plan is not None and packed.plan.reads(Bits12Weight)
    work.found.products[module] = packed.product
    return True


def _fuse_norm(module: nn.Module, work: _Work) -> bool:
    norm = Norm.of(module)
    if norm is None:
        return False

    own = module.forward

    def forward(x: torch.Tensor, *gates: Any, **options: Any) -> torch.Tensor:
        whole: torch.Tensor = own(x, *gates, **options) if gates or options else norm_rows(x, norm)
        return whole

    weight = next(module.parameters())
    probe = torch.randn(2, 3, len(weight), device=weight.device, dtype=torch.float32).to(weight.dtype)
    if not _replace_forward(module, forward, probe, work):
        return False
    work.found.norms[module] = norm
    return True


def _fuse_head(model: nn.Module, work: _Work) -> None:
    """Replace the head's matmul for few rows by one at memory speed; in 12 bits if the layers' weights are."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = weight_of(head)
    if weight is None or not max_rows_of(weight):
        return
    if isinstance(head, QuantisedLinear) and "forward" in vars(head):
        return  # `_tile_linears` has replaced it
    if not work.fusions.num_compact and not any(isinstance(module, QuantisedLinear) for module in model.modules()):
        weight = weight.fallback or weight
    chosen = plan(weight, "head", _bias_of(head), agree=work.agree, linear=work.linear)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return chosen.matmul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    probe = _probe(weight)
    if work.linear is not None and chosen.kinds:
        setattr(head, "forward", forward)  # noqa: B010, compared by the plan; restored by `undo`
        work.fusions.num_compact += chosen.reads(Bits12Weight)
    elif work.linear is None and work.agree(head(probe[:, :1]), forward(probe[:, :1])):
        replaced = _replace_forward(head, forward, probe, work)
        work.fusions.num_compact += replaced and chosen.reads(Bits12Weight)


def _fuse_rotary(model: nn.Module, work: _Work, *, dry: bool) -> None:
    """Replace the rotary embedding of the model's file; tensors on other devices still use the file's own."""
    sources = {type(m).__module__ for m in model.modules() if type(m).__name__.endswith("Attention")}
    device = next(model.parameters()).device
    for name in sources:
        source = sys.modules.get(name)
        patch = RotaryPatch.of(source, rotate) if source is not None else None
        if patch is not None and _same_rotation(patch.original, patch.fused, model) and not dry:
            patch.add(device.type)
            work.fusions.add(partial(patch.remove, device.type))


def _same_rotation(original: Callable[..., Any], fused: Callable[..., Any], model: nn.Module) -> bool:
    """Return True if both rotate random heads equally, as many and as large as the configuration says."""
    config: Any = getattr(model, "config", None)
    like = next(model.parameters())
    try:
        num_heads = getattr(config, "num_attention_heads", None) or 4
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        half = (getattr(config, "head_dim", None) or 16) // 2
        q, k = (
            torch.randn(1, n, 3, 2 * half, device=like.device, dtype=torch.float32).to(like.dtype)
            for n in (num_heads, num_kv_heads)
        )
        angle = torch.randn(1, 3, half, device=like.device, dtype=torch.float32)
        cos, sin = (torch.cat([f(angle)] * 2, -1).to(like.dtype) for f in (torch.cos, torch.sin))
        old, new = original(q, k, cos, sin), fused(q, k, cos, sin)
    except Exception:  # another signature or kind of rotation, or heads of several sizes: the original stays
        return False
    return all(_agree(a, b) for a, b in zip(old, new, strict=True))


def _replace_forward(
    module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor, work: _Work
) -> bool:
    try:
        agree = work.agree(module(probe), forward(probe))
    except Exception:  # its arguments differ, or the kernel refuses this shape: the original stays
        return False
    if agree:
        module.forward = forward
        work.fusions.add(partial(delattr, module, "forward"))
    return agree


def _probe(weight: Weight, num_tokens: int = 3) -> torch.Tensor:
    return torch.randn(1, num_tokens, weight.shape[1], device=weight.device, dtype=torch.float32).to(weight.dtype)


def _agree(old: torch.Tensor, new: torch.Tensor) -> bool:
    return allclose(old, new, TOLERANCE.get(old.dtype, 0.0))


def _same_shape(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return True if shapes are equal: the only test of results that were not computed."""
    return old.shape == new.shape


def _release(linears: Sequence[nn.Module]) -> None:
    """Free weights that now live in a packed one."""
    for linear in linears:
        put_weight(linear, None)
        if (bias := _bias_of(linear)) is not None:
            linear.bias = nn.Parameter(bias.new_empty(0), requires_grad=False)


def _restore(module: nn.Module, linears: Sequence[tuple[str, nn.Module]], packed: PackedProjections) -> None:
    packed.unpack([linear for _, linear in linears])
    for name, linear in linears:
        setattr(module, name, linear)
