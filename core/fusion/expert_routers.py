"""Recognise a mixture's router, the rule that yields the experts and weights which the model's own code chose, and its
shared experts, which every token has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graftlm.core.execution.routing import Routing
from graftlm.kernels.gpu.mixture.router import MAX_EXPERTS, Router


def router_of(block: nn.Module, experts: nn.Module, routing: Routing, num_experts: int) -> Router | None:
    """Return the rule by which `block` routed; None if no supported rule reproduces it.

    The candidates are the rules of transformers' families, each tested on the recorded routing.
    """
    if num_experts > MAX_EXPERTS:
        return None
    inner = set(experts.modules())
    modules = [module for module in block.modules() if module not in inner]
    for linear in modules:
        weight: Any = getattr(linear, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.shape != (num_experts, routing.x.shape[1]):
            continue
        bias: Any = getattr(linear, "bias", None)
        bias = bias.detach() if isinstance(bias, torch.Tensor) and bias.shape == (num_experts,) else None
        base = Router(weight.detach(), routing.experts.shape[1], bias)
        corrections = [v for module in modules for v in _vectors(module, num_experts) if module is not linear]
        corrections += [v for v in _vectors(linear, num_experts) if bias is None or v.data_ptr() != bias.data_ptr()]
        for rule in _rules(base, corrections, _groups(modules), routing.x.dtype):
            found = _scaled(rule, routing, modules)
            if found is not None:
                return found
    return None


@dataclass(frozen=True)
class Gated:
    """Shared experts behind a gate of their own, a linear layer of one output."""

    experts: nn.Module
    gate: nn.Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.gate(x).sigmoid() * self.experts(x)
        return out


def shared_experts(
    block: nn.Module, experts: nn.Module, x: torch.Tensor
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Yield candidates for a block's shared experts: another child, with or without a gate of its own."""
    children = [child for child in block.children() if child is not experts]
    gates = [child for child in children if isinstance(child, nn.Linear) and child.out_features == 1]
    for child in children:
        try:
            fits = child not in gates and child(x).shape == x.shape
        except Exception:  # a router, or another kind of module
            continue
        if fits:
            yield child
            yield from (Gated(child, gate) for gate in gates)


def chosen(router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Route x [num_tokens, hidden_size] by the definition of `router`. -> experts, weights [num_tokens, top_k]"""
    logits = nn.functional.linear(x.float(), router.weight.float())
    logits = (logits if router.bias is None else logits + router.bias.float()).to(router.logits_dtype).float()
    score = logits
    if router.score != "logits":
        score = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    choice = score if router.correction is None else score + router.correction.float()
    if router.top_groups < router.num_groups:
        grouped = choice.view(len(x), router.num_groups, -1)
        best = grouped.topk(2 if router.group_score == "two" else 1, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(router.top_groups, -1).indices, 1.0)
        choice = grouped.masked_fill(kept[..., None] == 0, float("-inf")).view_as(choice)
    experts = choice.topk(router.top_k, -1).indices
    weights = score.gather(1, experts)
    if router.after != "none":
        weights = weights.softmax(-1) if router.after == "softmax" else weights.sigmoid()
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + router.eps)
    return experts, weights * router.scale


def _vectors(module: nn.Module, num_experts: int) -> Iterator[torch.Tensor]:
    """Yield the vectors that a module may add to the scores for the choice."""
    for name, tensor in itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        if tensor.numel() == num_experts and "bias" in name:
            yield tensor.detach().view(-1)


def _groups(modules: list[nn.Module]) -> list[tuple[int, int]]:
    """Return pairs: number of groups of experts, number of eligible groups; the fewest first."""
    found = {(1, 1)}
    for module in modules:
        holder: Any
        for holder in (module, getattr(module, "config", None)):
            names = [getattr(holder, name, None) for name in ("n_group", "num_group", "num_groups", "topk_group")]
            groups, top = next((n for n in names[:3] if isinstance(n, int)), 1), names[3]
            if isinstance(top, int) and 1 <= top < groups:
                found.add((groups, top))
    return sorted(found, reverse=True)


def _rules(
    base: Router, corrections: list[torch.Tensor], groups: list[tuple[int, int]], dtype: torch.dtype
) -> Iterator[Router]:
    num_experts = len(base.weight)
    dtypes = dict.fromkeys([dtype, torch.float32])
    scores: list[tuple[Any, Any]] = [
        ("softmax", "none"),
        ("logits", "softmax"),
        ("sigmoid", "none"),
        ("logits", "sigmoid"),
    ]
    group_scores: list[Any] = ["two", "best"]
    for (score, after), rounded, correction in itertools.product(scores, dtypes, [*corrections, None]):
        for (count, top), group_score in itertools.product(groups, group_scores):
            if count > 1 and (num_experts & (num_experts - 1) or num_experts % count):
                continue
            for renormalize, eps in ((False, 0.0), (True, 1e-20)):
                yield replace(
                    base, score=score, after=after, logits_dtype=rounded, correction=correction, num_groups=count,
                    top_groups=top, group_score=group_score, renormalize=renormalize, eps=eps,
                )  # fmt: skip


def _scaled(rule: Router, routing: Routing, modules: list[nn.Module]) -> Router | None:
    """Return `rule` with the factor of the recorded weights; None if its choice differs."""
    experts, weights = chosen(rule, routing.x)
    ratio = float((routing.weights.float().sum(-1) / weights.sum(-1)).median())
    holders = [holder for module in modules for holder in (module, getattr(module, "config", None))]
    numbers = [float(v) for holder in holders if holder is not None for v in vars(holder).values() if type(v) is float]
    scale = min([1.0, *numbers], key=lambda number: abs(number - ratio))
    return replace(rule, scale=scale) if routing.agrees(experts, weights * scale) else None
