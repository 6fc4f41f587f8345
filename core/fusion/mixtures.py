"""Mixtures of experts on GPUs: grouped matmuls in place of a model's own experts, and its router in two kernels.

The original block runs once, and the inputs of its experts are recorded. The record identifies the router, the experts,
and the shared experts that are added beside them. Experts of a supported layout are replaced in any block; a whole
block only if router, experts and shared experts are identified. A replacement whose output differs is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.routing import Routing, has_experts, in_order, replayed
from graftlm.core.fusion.expert_modules import expert_weights
from graftlm.core.fusion.expert_routers import Gated, router_of, shared_experts
from graftlm.core.fusion.linears import Fusions
from graftlm.core.tensor_parallel.ranks import REDUCE
from graftlm.kernels.codes.expert_codes import codes_of
from graftlm.kernels.expert_dispatch import plan_experts
from graftlm.kernels.gpu.mixture.expert_plan import ExpertPlan
from graftlm.kernels.gpu.mixture.expert_router import route
from graftlm.kernels.gpu.mixture.grouped_matmul import sum_parts
from graftlm.kernels.gpu.mixture.router import Router
from graftlm.kernels.gpu.norm import Beside, add_norm
from graftlm.kernels.linear_dispatch import AllClose, LinearPlan, SumParts
from graftlm.kernels.norm import Addition, Norm

_PROBED = 32
"""Tokens of the random input."""

MAX_PARTS_BYTES = 1 << 28
"""Bytes: the limit of the outputs of all experts for a step's tokens. A longer step runs in pieces."""


@dataclass(frozen=True)
class FusedExperts:
    """The replacement of the forward of a mixture's experts: (tokens, experts, weights) -> the weighted sum."""

    plan: ExpertPlan
    scale_input: bool = False

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Return the kernels of the matmuls."""
        return (self.plan.kinds,)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        experts, weights = in_order(*args, *options.values())
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        experts, weights = experts.to(torch.int32).contiguous(), weights.contiguous()
        pieces = [
            sum_parts(self.plan.parts(x[at], experts[at], weights[at], scale_input=self.scale_input), x.dtype)
            for at in pieces_of(x, experts.shape[1])
        ]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(hidden_states.shape)


@dataclass(frozen=True)
class Mixture:
    """The replacement of the forward of a whole mixture, and the MLP of a fused layer.

    shared       tokens [num_tokens, hidden_size] -> the addend of the experts' output, or None
    scale_input  whether routing weights multiply the experts' inputs, not their outputs (Llama 4)
    reduce       adds the experts' parts of other ranks; None without any
    """

    plan: ExpertPlan
    router: Router
    shared: Callable[[torch.Tensor], torch.Tensor] | None
    strict: bool = False
    scale_input: bool = False
    reduce: SumParts | None = None

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Return the kernels of the experts' matmuls."""
        return (self.plan.kinds,)

    @property
    def plans(self) -> tuple[LinearPlan, ...]:
        """Return no plans: experts are counted where they are replaced."""
        return ()

    @property
    def shared_experts(self) -> nn.Module | None:
        """Return the module of the shared experts, without its gate."""
        found = self.shared.experts if isinstance(self.shared, Gated) else self.shared
        return found if isinstance(found, nn.Module) else None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        total = self.reduce or sum_parts
        pieces = [total(self._parts(x[at]), x.dtype) for at in pieces_of(x, self.router.top_k)]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return (out if self.shared is None else out + self.shared(x)).view(hidden_states.shape)

    def add_norm(
        self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None, addition: Addition | None = None
    ) -> torch.Tensor | None:
        """Add the mixture of normed to the residual [num_tokens, n], in place. -> the residual after `norm`"""
        if addition is not None:
            return add_norm(self(normed)[None], residual, norm, addition=addition)
        if self.shared is not None and self.reduce is not None:
            residual.add_(self.shared(normed))
        pieces = [self._added(normed[at], residual[at], norm) for at in pieces_of(normed, self.router.top_k)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _added(self, normed: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if self.reduce is None:
            beside = beside_of(self.shared, normed) if self.shared is not None else None
            return add_norm(self._parts(normed), residual, norm, beside=beside, strict=self.strict)
        parts = self._parts(normed)
        found = self.reduce.add_norm(parts, residual, norm)
        return add_norm(self.reduce(parts, normed.dtype)[None], residual, norm) if found is None else found

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        router = partial(route, router=self.router, strict=self.strict)
        return self.plan.parts(x, *replayed(router(x), router), scale_input=self.scale_input)


@dataclass(frozen=True)
class FusedBlock:
    """The replacement of the forward of a block that also returns its router's logits, which no layer uses."""

    mixture: Mixture
    num_others: int

    @property
    def kernels(self) -> tuple[tuple[str, ...], ...]:
        """Return the kernels of the block's matmuls."""
        return self.mixture.kernels

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (self.mixture(hidden_states), *[None] * self.num_others)


def pieces_of(x: torch.Tensor, top_k: int) -> Iterator[slice]:
    """Yield the slices of x [num_tokens, n] that run through the experts together."""
    size = max(256, MAX_PARTS_BYTES // (top_k * x.shape[-1] * x.element_size()))
    return (slice(first, first + size) for first in range(0, max(len(x), 1), size))


def fuse_mixtures(
    model: nn.Module,
    mixtures: dict[nn.Module, Mixture],
    fusions: Fusions,
    agree: AllClose,
    *,
    strict: bool,
    dry: bool,
) -> None:
    """Replace experts and whole mixtures in `model`, before any other of its modules is replaced.

    mixtures  receives the mixtures that are replaced as a whole, by their module
    dry       accept every kernel without comparison
    """
    for block in list(model.modules()):
        inner = next((child for child in block.children() if has_experts(child)), None)
        if inner is None:
            continue
        _lay_out(inner, fusions)
        weights = expert_weights(inner)
        if isinstance(weights, str):
            fusions.reasons[type(inner).__name__] = f"experts keep torch's products: {weights}"
            continue
        seen = _seen(block, inner, weights.down)
        reason = ""
        for form in filter(None, (weights, weights.fallback)):
            plan = plan_experts(form, strict=strict)
            try:
                reason = "" if _agrees(inner, plan, seen, weights.down, agree) else "the kernels' result differs"
            except Exception as error:  # the card lacks memory, or a kernel does not support this shape
                reason = str(error).partition("\n")[0][:200] or type(error).__name__
            if not reason:
                break
        if reason:
            fusions.reasons[type(inner).__name__] = f"experts keep torch's products: {reason}"
            continue
        mixture = _whole(block, inner, plan, seen, strict=strict, dry=dry) if seen is not None else None
        if seen is None or not seen.scale_input:
            _put(inner, FusedExperts(plan), fusions)
        if (mixture is None or seen is None) and hasattr(block, "self_attn"):
            continue  # experts of a whole layer, which is fused by itself (Gemma 4)
        if mixture is None or seen is None:
            fusions.reasons[type(block).__name__] = "its own code routes: the router, or what it adds, is not known"
            continue
        fusions.num_compact += plan.compact is not None and weights.codes is None
        mixtures[block] = mixture
        whole = isinstance(seen.out, torch.Tensor)
        _put(block, mixture if whole else FusedBlock(mixture, len(seen.out) - 1), fusions)


def _lay_out(experts: nn.Module, fusions: Fusions) -> None:
    """Order the memory of experts' weights by output, so that the tensor memory accelerator reads them.

    Shapes and values stay. Weights [num_experts, inputs, outputs] (GPT-OSS) are ordered by input otherwise.
    """
    if not getattr(experts, "is_transposed", False) or codes_of(experts):
        return
    for parameter in experts.parameters(recurse=False):
        if parameter.is_cuda and parameter.dim() == 3 and parameter.itemsize == 2 and parameter.is_contiguous():
            parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
            fusions.add(partial(_in_order_again, parameter), weights=True)


def _in_order_again(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.contiguous()


@dataclass(frozen=True)
class _Seen:
    """The record of a block's run on random tokens: routing, output of the experts [num_tokens, n] and of the block."""

    routing: Routing
    routed: torch.Tensor
    out: Any
    scale_input: bool = False


def _seen(block: nn.Module, experts: nn.Module, down: torch.Tensor) -> _Seen | None:
    """Record the block's run; None if it takes other arguments, or passes other tokens to its experts."""
    calls: list[tuple[torch.Tensor, tuple[Any, ...], torch.Tensor]] = []
    own = experts.forward

    def listen(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = own(hidden, *args, **options)
        calls.append((hidden, (*args, *options.values()), out.clone()))
        return out

    x = torch.randn(_PROBED, down.shape[1], device=down.device, dtype=torch.float32).to(down.dtype)
    setattr(experts, "forward", listen)  # noqa: B010
    try:
        out = block(x[None].clone())
    except Exception:  # its arguments differ
        return None
    finally:
        delattr(experts, "forward")
    if len(calls) != 1:
        return None
    hidden, given, routed = calls[0]
    if not given and hidden.numel() == len(down) * x.numel():
        return _seen_whole(block, experts, x, routed.view(len(down), *x.shape).sum(0), out)
    if len(given) < 2 or hidden.numel() != x.numel() or not torch.equal(hidden.reshape(x.shape), x):
        return None
    chosen, weights = in_order(*given)
    return _Seen(Routing(x, chosen, weights), routed.reshape(x.shape), out) if chosen.dim() == 2 else None


def _seen_whole(block: nn.Module, experts: nn.Module, x: torch.Tensor, routed: torch.Tensor, out: Any) -> _Seen | None:
    """Return the record of experts that take all tokens, multiplied by routing weights that are 0 where not chosen."""
    for child in block.children():
        try:
            found = child(x) if child is not experts else None
        except Exception:  # not a router
            continue
        for scores in found if isinstance(found, tuple) else ():
            chosen = (scores != 0).sum(-1)
            if scores.dim() == 2 and len(scores) == len(x) and 0 < int(chosen[0]) < scores.shape[1]:
                weights, indices = scores.topk(int(chosen[0]), -1)
                return _Seen(Routing(x, indices, weights), routed, out, scale_input=True)
    return None


def _agrees(experts: nn.Module, plan: ExpertPlan, seen: _Seen | None, down: torch.Tensor, agree: AllClose) -> bool:
    """Return True if fused experts reproduce the module's output, for the recorded routing or a random one."""
    if seen is not None:
        routing, fused = seen.routing, FusedExperts(plan, seen.scale_input)
        return agree(seen.routed, fused(routing.x, routing.experts, routing.weights))
    x = torch.randn(_PROBED, down.shape[1], device=down.device, dtype=torch.float32).to(down.dtype)
    scores = torch.rand(_PROBED, len(down), device=down.device, dtype=torch.float32)
    weights, chosen = (scores.to(down.dtype)).topk(min(2, len(down)), -1)
    return agree(experts(x, chosen, weights), FusedExperts(plan)(x, chosen, weights))


def _whole(
    block: nn.Module, experts: nn.Module, plan: ExpertPlan, seen: _Seen, *, strict: bool, dry: bool
) -> Mixture | None:
    """Return the whole block; None if its router or its shared experts are not identified."""
    router = router_of(block, experts, seen.routing, plan.num_experts)
    if router is None:
        return None
    fused = route(seen.routing.x, router, strict=strict)
    if not dry and not seen.routing.agrees(*fused):
        return None
    out = seen.out[0] if isinstance(seen.out, tuple) else seen.out
    if not isinstance(out, torch.Tensor) or out.numel() != seen.routed.numel():
        return None
    added = out.reshape(seen.routed.shape)
    reduce: SumParts | None = getattr(experts, REDUCE, None)
    routed = seen.routed if reduce is None else reduce(seen.routed[None], seen.routed.dtype)
    if _close(added, routed):
        return Mixture(plan, router, None, strict, seen.scale_input, reduce)
    for shared in shared_experts(block, experts, seen.routing.x):
        if _close(added, routed + shared(seen.routing.x)):
            return Mixture(plan, router, shared, strict, seen.scale_input, reduce)
    return None


def beside_of(shared: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Beside:
    """Run shared experts on x [num_tokens, n]. -> their output, with a gate that is still to be applied"""
    gate = shared.gate.weight if isinstance(shared, Gated) and shared.gate.bias is None else None
    if gate is None or gate.shape[1] != x.shape[1]:
        return Beside(shared(x))
    return Beside(shared.experts(x), x, gate[0])


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
    return float((a.float() - b.float()).norm() / a.float().norm().clamp_min(1e-30)) < tolerance


def _put(module: nn.Module, forward: Callable[..., Any], fusions: Fusions) -> None:
    setattr(module, "forward", forward)  # noqa: B010
    fusions.add(partial(delattr, module, "forward"))
