"""Modules of a model whose weights are quantised: a linear layer and an embedding, in place of torch's.

They hold the weight as it was read. Their own forward computes the dense weight in every call: it is the reference of
the fusions, which replace them when a model is loaded, and runs formats that no kernel multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from graftlm.kernels.quantised_weight import QuantisedWeight
from graftlm.kernels.weight import Weight, WeightFormat, register_format


class QuantisedLinear(nn.Linear):
    """A linear layer with a quantised weight; `quantised` is None once a fusion has taken it."""

    def __init__(self, weight: Weight, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.quantised: Weight | None = weight
        self.dtype = weight.dtype
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return a dense copy of the weight."""
        return _held(self.quantised).dense()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight, self.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the weight to the device to which `fn` moves tensors; its dtypes are those of its format."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if isinstance(self.quantised, QuantisedWeight):
            self.quantised = self.quantised.to(
                fn(torch.empty(0, device=self.quantised.device, dtype=torch.float32)).device
            )
        return self

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        """Do nothing: the weight is no tensor of the state."""


class QuantisedEmbedding(nn.Embedding):
    """An embedding with a quantised weight, which may be that of the head too."""

    def __init__(self, weight: QuantisedWeight, padding_idx: int | None = None) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.quantised: QuantisedWeight | None = weight
        self.dtype = weight.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return a dense copy of the weight."""
        return _held(self.quantised).dense()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = _held(self.quantised)
        assert isinstance(weight, QuantisedWeight)
        return outputs_of(weight, input.reshape(-1)).view(*input.shape, -1)


def _held(weight: Weight | None) -> Weight:
    if weight is None:
        raise RuntimeError("the weight of this module was packed; `unpack` of its replacement restores it")
    return weight


def _put(module: QuantisedLinear | QuantisedEmbedding, weight: Weight | None) -> None:
    setattr(module, "quantised", weight)  # noqa: B010, of either class


register_format(QuantisedLinear, WeightFormat(lambda module: _held(module.quantised), _put))


def outputs_of(weight: QuantisedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Return the values of outputs `ids` int64 [n]. -> [n, k]"""
    scale = weight.scale.contiguous().view(torch.uint8)[ids // weight.block_n].view(weight.scale.dtype)
    rest: dict[str, Any] = {
        name: x[ids] for name in ("zero", "minimum") if isinstance(x := getattr(weight, name), torch.Tensor)
    }
    return replace(weight, codes=weight.codes[ids], block_n=1, scale=scale, **rest).dense()


def put_quantised(model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Replace linear layers and embeddings of `model` by modules with quantised weights.

    weights  by the names of the replaced tensors: "model.layers.0.mlp.up_proj.weight"
    Raises KeyError for a name that is no weight of a linear layer or an embedding.
    """
    for name, weight in weights.items():
        path, _, leaf = name.rpartition(".")
        parent_path, _, child = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        module = getattr(parent, child, None)
        if leaf == "weight" and type(module) is nn.Linear:
            setattr(parent, child, QuantisedLinear(weight, module.bias))
        elif leaf == "weight" and type(module) is nn.Embedding and isinstance(weight, QuantisedWeight):
            setattr(parent, child, QuantisedEmbedding(weight, module.padding_idx))
        else:
            raise KeyError(f"{name!r} is no weight of a plain linear layer or embedding")
