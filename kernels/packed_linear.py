"""Linear layers on a CPU through oneDNN, with the weight in oneDNN's own block layout.

Decoding multiplies a few rows with every weight of the model. torch hands float32 products to a BLAS that is slow
for so few rows on many CPUs, and bfloat16 products to oneDNN with a weight that it lays out anew in every call.
A weight that is laid out once takes no more memory and runs 1.3 to 2.6 times as fast with 1 to 64 rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_LINEAR: Any = None
_REORDER: Any = None
if torch._C._has_mkldnn:
    _LINEAR = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)
    _REORDER = getattr(getattr(torch.ops.mkldnn, "_reorder_linear_weight", None), "default", None)


class PackedLinear(nn.Linear):
    """Takes the place of an nn.Linear and of its weight's memory; `unpack` gives both back.

    The original module stays as it is, but its weight is empty meanwhile. With `in_place`, the weight stays
    where it is, for weights that others use too, such as a head tied to the embedding: slower, but oneDNN still.
    """

    def __init__(self, original: nn.Linear, *, in_place: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.bias = original.bias
        self.training = original.training
        self._original = (original,)  # in a tuple: not a submodule, whose parameters would be counted twice
        self._packed = None if in_place else _REORDER(original.weight.detach())

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight in its plain layout; a copy, unless made `in_place`."""
        if self._packed is None:
            return self._original[0].weight
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def release_original(self) -> None:
        """Free the memory of the original weight, now that this one is in use."""
        if self._packed is not None:
            self._original[0].weight.data = torch.empty(0, dtype=self._original[0].weight.dtype)

    def unpack(self) -> nn.Linear:
        """Give the weight back to the original module."""
        original = self._original[0]
        if self._packed is not None and original.weight.numel() == 0:
            original.weight.data = self._packed.to_dense()
        return original

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self._original[0].weight if self._packed is None else self._packed
        output: torch.Tensor = _LINEAR(input, weight, self.bias, "none", [], "")
        return output

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def packable(module: nn.Module) -> bool:
    """Whether `module` is a plain linear layer on a CPU that oneDNN can take over."""
    if _LINEAR is None or _REORDER is None or type(module) is not nn.Linear:
        return False
    weight = module.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and weight.is_contiguous()
        and not (module._forward_hooks or module._forward_pre_hooks or getattr(module, "parametrizations", None))
    )
