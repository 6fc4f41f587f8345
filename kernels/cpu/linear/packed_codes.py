"""Linear layers and embeddings whose quantised weight is in panels, in place of kernels/quantised_modules.py.

A weight is in memory once: as panels, which a tied head and embedding share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graftlm.kernels.cpu.linear.packed_linear import linear
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels, unpack
from graftlm.kernels.quantised_modules import QuantisedEmbedding, QuantisedLinear


class PackedCodes(nn.Linear):
    """The replacement of a QuantisedLinear; `unpack` restores the original."""

    def __init__(self, original: QuantisedLinear, panels: QuantisedPanels) -> None:
        nn.Module.__init__(self)
        self._original = (original,)  # in a tuple: a submodule's parameters would be counted twice
        bias = original.bias.detach() if original.bias is not None else None
        self._panels = panels._replace(bias=bias)
        self.out_features, self.in_features = panels.num_out, panels.num_in
        self.register_parameter("bias", original.bias)
        self.training = original.training

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return a dense copy of the weight."""
        return self._panels.dense()

    @property
    def dtype(self) -> torch.dtype:
        """Return the weight's dtype, without the copy of `weight`."""
        return self._panels.dtype

    @property
    def whole(self) -> QuantisedPanels:
        """Return the weight without the bias, inputs in any order."""
        return self._panels._replace(bias=None)

    def panels(self) -> QuantisedPanels | None:
        """Return the weight for compiled layers; None if its inputs are in another order."""
        return self._panels if self._panels.order is None else None

    def unpack(self) -> nn.Module:
        """Restore the original module's weight."""
        (original,) = self._original
        if original.quantised is None:
            original.quantised = unpack(self._panels)
        return original

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = input.reshape(-1, self.in_features)
        if self._panels.order is not None:
            x = x.index_select(1, self._panels.order)
        return linear(x, self._panels).view(*input.shape[:-1], -1)


class PackedRows(nn.Embedding):
    """The replacement of a QuantisedEmbedding; `unpack` restores the original."""

    def __init__(self, original: QuantisedEmbedding, panels: QuantisedPanels) -> None:
        nn.Module.__init__(self)
        self._original, self.panels = (original,), panels
        self.num_embeddings, self.embedding_dim = panels.num_out, panels.num_in
        self.padding_idx, self.max_norm = original.padding_idx, None
        self.training = original.training

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return a dense copy of the weight."""
        return self.panels.dense()

    @property
    def dtype(self) -> torch.dtype:
        """Return the weight's dtype, without the copy of `weight`."""
        return self.panels.dtype

    def unpack(self) -> nn.Module:
        """Restore the original module's weight."""
        (original,) = self._original
        if original.quantised is None:
            original.quantised = unpack(self.panels)
        return original

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, int64. Raises IndexError for an id outside the embedding."""
        ids = input.reshape(-1).long().contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"an id of {ids.tolist()[:8]} is no row of the embedding, which has {self.num_embeddings}")
        return self.panels.gather(ids).view(*input.shape, -1)


def put_packed(model: nn.Module, weights: Mapping[str, QuantisedPanels]) -> None:
    """Replace linear layers and embeddings of `model` by packed ones.

    weights  by the names of the replaced tensors: "model.layers.0.mlp.up_proj.weight"
    """
    for name, panels in weights.items():
        path = name.removesuffix(".weight")
        parent_path, _, child = path.rpartition(".")
        plain: Any = model.get_submodule(path)
        taken: Any = panels  # the original has its shape alone: the weight is in panels already
        packed: PackedCodes | PackedRows
        if isinstance(plain, nn.Embedding):
            packed = PackedRows(QuantisedEmbedding(taken, plain.padding_idx), panels)
        else:
            packed = PackedCodes(QuantisedLinear(taken, plain.bias), panels)
        packed._original[0].quantised = None
        setattr(model.get_submodule(parent_path), child, packed.eval())
