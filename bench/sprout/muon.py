"""Muon: momentum whose step is orthogonalised, for the matrices between the layers.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix [count, rows, cols] near 1 by a Newton-Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.mT if tall else x
    return orthogonal.float()


class Muon(torch.optim.Optimizer):
    """`lr` is the size of a step for a square matrix; `weight_decay` is relative to it."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                # matrices of one shape go through the iteration together
                grads = [p.grad for p in parameters if p.grad is not None]
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
                updates = torch._foreach_lerp(grads, buffers, group["momentum"])
                stacked = orthogonalize(torch.stack(updates)) * max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(stacked.unbind(0)), alpha=-group["lr"])
