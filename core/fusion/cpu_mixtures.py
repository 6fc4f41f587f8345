"""Mixtures of experts on CPUs: weights packed once in panels, and a compiled loop that reads only the experts hit.

The experts' module gets a compiled forward. Where the router is recognised, the mixture is a part of the compiled
decoder layer too (cpu_layers.py). Shared experts are further experts there, which every token has; a mixture that adds
anything else runs its own code around the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graftlm.core.execution.routing import Routing, in_order, mixtures_of
from graftlm.core.fusion.expert_routers import Gated, router_of, shared_experts
from graftlm.core.fusion.layer_parts import activation_of, allclose
from graftlm.kernels.codes.expert_codes import codes_of
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.weight import PlainWeight, weight_of

if TYPE_CHECKING:
    from graftlm.core.fusion.linears import Fusions
    from graftlm.kernels.activation import Activation
    from graftlm.kernels.cpu.decoder.mixture import CompiledExperts, ExpertPanels, SharedExperts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error between experts and their replacement on random input."""

_PROBED = 16
"""Tokens of the random input."""


def fuse_mixtures(model: nn.Module, fusions: Fusions) -> dict[nn.Module, CompiledExperts]:
    """Replace the forward of experts, one mixture after the other. -> the mixtures that compiled code computes whole"""
    found: dict[nn.Module, CompiledExperts] = {}
    for block, experts in list(mixtures_of(model)):
        reason = _fuse(block, experts, fusions, found)
        if reason is not None:
            fusions.reasons[type(experts).__name__] = f"experts keep torch's products: {reason}"
    return found


def _fuse(block: nn.Module, experts: Any, fusions: Fusions, found: dict[nn.Module, CompiledExperts]) -> str | None:
    """Replace the experts of one mixture; return the reason if they keep their own forward."""
    from graftlm.kernels.cpu.decoder.mixture import CompiledExperts, ExpertPanels, router_problem

    problem = _problem(experts)
    activation = activation_of(getattr(experts, "act_fn", None))
    if problem is not None or activation is None:
        return problem or "their gate is neither SiLU nor GELU"
    gate_up, down = experts.gate_up_proj, experts.down_proj
    seen = _seen(block, experts, gate_up)
    if isinstance(seen, str):
        return seen
    routing, expected, out = seen
    tolerance = TOLERANCE[gate_up.dtype]
    router = router_of(block, experts, routing, len(down))
    unknown = "its router is unknown" if router is None else router_problem(router)
    alone = isinstance(out, torch.Tensor) and allclose(expected, out.reshape(expected.shape), tolerance)
    shared = (
        None if alone or unknown or not isinstance(out, torch.Tensor) else _shared(block, experts, seen, activation)
    )
    panels = ExpertPanels.of(gate_up.detach(), down.detach(), activation, shared)
    compiled = CompiledExperts(panels)
    chosen = routing.experts, routing.weights.float()
    if not fusions.passes(lambda: allclose(expected, compiled.chosen(routing.x, *chosen), tolerance)):
        return "the compiled code's output differs"
    experts.forward = partial(_forward, compiled)
    for parameter in (gate_up, down):
        parameter.data = parameter.new_empty(0, *parameter.shape[1:])
    fusions.num_packed += 1
    fusions.add(partial(_restore, experts, panels), weights=True)
    if router is None or unknown is not None:
        fusions.reasons[type(block).__name__] = str(unknown)
    elif not alone and shared is None:
        fusions.reasons[type(block).__name__] = "it adds more than its experts' outputs"
    else:
        found[block] = CompiledExperts(panels, router, shared.gate if shared is not None else None)
    return None


def _shared(
    block: nn.Module, experts: Any, seen: tuple[Routing, torch.Tensor, torch.Tensor], activation: Activation
) -> SharedExperts | None:
    """Return the experts that a mixture adds to those chosen; None if it adds anything else."""
    routing, expected, out = seen
    for found in shared_experts(block, experts, routing.x):
        if allclose(out.reshape(expected.shape), expected + found(routing.x), TOLERANCE[expected.dtype]):
            gate = found.gate if isinstance(found, Gated) else None
            mlp = found.experts if isinstance(found, Gated) else found
            return _as_experts(mlp, gate, experts.down_proj.shape[2], activation)
    return None


def _as_experts(mlp: Any, gate: nn.Linear | None, gate_size: int, activation: Activation) -> SharedExperts | None:
    """Return an MLP as experts of a gate size; None if it is of another kind, or no multiple of the size."""
    from graftlm.kernels.cpu.decoder.mixture import SharedExperts

    linears: list[Any] = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linears += [gate] if gate is not None else []
    if activation_of(getattr(mlp, "act_fn", None)) != activation or not all(map(_is_plain, linears)):
        return None
    gates, ups, downs = (linear.weight.detach() for linear in linears[:3])
    num_shared, rest = divmod(len(gates), gate_size)
    if rest or not num_shared:
        return None
    gate_up = torch.cat([x.unflatten(0, (num_shared, gate_size)) for x in (gates, ups)], 1)
    down = downs.unflatten(1, (num_shared, gate_size)).transpose(0, 1)
    return SharedExperts(gate_up, down, gate.weight.detach()[0] if gate is not None else None)


def _is_plain(linear: Any) -> bool:
    """Return True for a linear layer without a bias, packed or not."""
    is_plain = isinstance(linear, PackedLinear) or type(weight_of(linear)) is PlainWeight
    return is_plain and linear.bias is None


def _problem(experts: Any) -> str | None:
    """Return the reason why the compiled code cannot read the weights of experts; None if it can."""
    gate_up, down = getattr(experts, "gate_up_proj", None), experts.down_proj
    if codes_of(experts) or not isinstance(gate_up, nn.Parameter) or gate_up.dim() != 3 or not gate_up.numel():
        return "their weights are not two plain tensors"
    if gate_up.dtype not in TOLERANCE:
        return f"weights in {str(gate_up.dtype).removeprefix('torch.')}"
    flags = {"is_transposed": False, "is_concatenated": True, "has_gate": True, "has_bias": False}
    wrong = [name for name, usual in flags.items() if getattr(experts, name, usual) != usual]
    if wrong or gate_up.shape != (len(down), 2 * down.shape[2], down.shape[1]):
        return f"another layout ({', '.join(wrong) or 'shapes'})"
    if any("bias" in name for name, _ in experts.named_parameters(recurse=False)):
        return "they have biases"
    return None


def _seen(block: nn.Module, experts: Any, like: torch.Tensor) -> tuple[Routing, torch.Tensor, Any] | str:
    """Run a block on random tokens. -> its routing, the output of its experts and its own; or the reason if it fails"""
    calls: list[tuple[torch.Tensor, tuple[Any, ...], torch.Tensor]] = []
    own: Callable[..., torch.Tensor] = experts.forward

    def listen(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = own(hidden, *args, **options)
        calls.append((hidden, (*args, *options.values()), out.clone()))
        return out

    x = torch.randn(_PROBED, like.shape[2], dtype=torch.float32).to(like.dtype)
    before = vars(experts).get("forward")
    experts.forward = listen
    try:
        out = block(x[None].clone())
    except Exception as error:  # its arguments differ
        return f"the mixture does not run by itself ({type(error).__name__})"
    finally:
        if before is None:
            del experts.forward
        else:
            experts.forward = before
    if len(calls) != 1 or len(calls[0][1]) < 2:
        return "the mixture calls them in another way"
    hidden, given, routed = calls[0]
    chosen, weights = in_order(*given)
    if not torch.equal(hidden.reshape(-1, x.shape[1]), x) or chosen.dim() != 2 or chosen.shape != weights.shape:
        return "the mixture gives them other tokens than its own"
    return Routing(x, chosen, weights), routed.reshape(x.shape), out


def _forward(compiled: CompiledExperts, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    chosen, weights = in_order(*args, *options.values())
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    return compiled.chosen(x, chosen, weights).view(hidden_states.shape)


def _restore(experts: Any, panels: ExpertPanels) -> None:
    del experts.forward
    experts.gate_up_proj.data, experts.down_proj.data = panels.unpack()
