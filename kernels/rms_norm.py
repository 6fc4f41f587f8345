"""RMSNorm: its weight and epsilon, read from a model's module."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """An RMSNorm: weight [n] and epsilon."""

    weight: torch.Tensor
    eps: float

    @classmethod
    def of(cls, module: object) -> Norm | None:
        """The norm that `module` computes, judged by its name and attributes; None if it is no RMSNorm.

        The weight is detached: whoever takes its address keeps it alive, even after the parameter was replaced.
        """
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor) or eps is None:
            return None
        return cls(weight.detach(), float(eps))
