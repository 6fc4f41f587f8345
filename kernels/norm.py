"""RMSNorm and LayerNorm in their rounding variants, recognised from a model's module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

_EPS = ("variance_epsilon", "eps")
_PROBED = (0.2, 1.0, 5.0)
_SAME = 5e-2
"""Relative error up to which a module may be a supported norm; fusion requires a smaller one."""


class Norm(NamedTuple):
    """A norm over the last dimension: weight [n] and epsilon.

    rounded   whether x is rounded to its dtype before the weight multiplies it (Llama) or only at the end (Gemma, whose
              weight of 1 + w is in float32)
    bias      [n], added at the end
    centered  LayerNorm: the mean is subtracted first
    """

    weight: torch.Tensor
    eps: float
    rounded: bool = True
    bias: torch.Tensor | None = None
    centered: bool = False

    @classmethod
    def of(cls, module: object) -> Norm | None:
        """Return the norm that is closest to `module` on random input; None if none is close.

        Weights are detached: code that uses their address keeps them alive, even if the parameter is replaced.
        """
        eps = next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)
        if "Norm" not in type(module).__name__ or eps is None or not callable(module):
            return None
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not weight.is_floating_point():
            return None
        scales = torch.tensor(_PROBED, dtype=torch.float32)[:, None]
        x = scales * torch.randn(len(_PROBED), len(weight), dtype=torch.float32)
        x = x.to(weight.device, weight.dtype)
        try:
            with torch.no_grad():
                expected = module(x)
                least, closest = _SAME, None
                for norm in cls._forms(weight.detach(), bias, float(eps)):
                    error = norm.error(x, expected)
                    if error < least:
                        least, closest = error, norm
                    if error == 0:
                        break
        except Exception:  # its arguments or outputs differ
            return None
        return closest

    @classmethod
    def _forms(cls, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Iterator[Norm]:
        """Yield all norms of this weight, in order of preference among equal ones."""
        if bias is None:
            yield cls(weight, eps)
            yield cls(weight, eps, rounded=False)
            yield cls(1.0 + weight.float(), eps, rounded=False)
        shift = bias.detach() if bias is not None else None
        yield cls(weight, eps, False, shift, centered=True)
        yield cls(1.0 + weight.float(), eps, False, shift, centered=True)

    @property
    def is_plain(self) -> bool:
        """Return True for an RMSNorm with Llama's rounding."""
        return self.rounded and self.bias is None and not self.centered

    def error(self, x: torch.Tensor, expected: torch.Tensor) -> float:
        """Return the relative error (Euclidean norm) between `expected` and this norm of x."""
        return float((self(x).float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the norm by its definition: x [..., n] -> [..., n], dtype of x."""
        value = x.float()
        if self.centered:
            value = value - value.mean(-1, keepdim=True)
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.eps)
        value = self.weight.float() * (value.to(x.dtype).float() if self.rounded else value)
        return (value + self.bias.float() if self.bias is not None else value).to(x.dtype)


class Addition(NamedTuple):
    """The addition of an attention or MLP to the residual stream: scale * (residual + factor * post(output)).

    post  an RMSNorm of the output (sandwich norms)
    """

    post: Norm | None = None
    factor: float = 1.0
    scale: float = 1.0
