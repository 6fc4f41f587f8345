"""A large linear layer on a CPU as several packed ones, whose weight is never in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.cpu.linear.panels import Panels
from graftlm.kernels.cpu.mapped_files import discard

_PIECE_BYTES = 8 << 20
_MOST_PIECES = 16

Pack = Callable[[nn.Linear], PackedLinear | None]
"""Packs a linear layer; returns None if the packed layer's output differs."""


class PackedPieces(nn.Linear):
    """The replacement of a large nn.Linear, such as a head, by packed layers of some outputs each; see `unpack`."""

    def __init__(self, original: nn.Linear, pieces: Sequence[PackedLinear]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = original.in_features, original.out_features
        self._original = (original,)  # in tuples: parameters of submodules would be counted twice
        self._pieces = tuple(pieces)
        self.register_parameter("bias", original.bias)
        self.training = original.training

    @classmethod
    def of(cls, original: nn.Linear, pack: Pack) -> PackedPieces | None:
        """Pack a layer piece by piece, freeing each packed piece; None, with nothing changed, if `pack` returns None.

        No other code may read the weight's memory.
        """
        weight, bias = original.weight.detach(), original.bias
        num_out = outputs_of_piece(weight)
        pieces: list[PackedLinear] = []
        for first in range(0, len(weight), num_out):
            here = slice(first, first + num_out)
            rows = nn.Linear(1, 1, bias=bias is not None, device="meta")
            rows.weight = nn.Parameter(weight[here], requires_grad=False)
            if bias is not None:
                rows.bias = nn.Parameter(bias.detach()[here], requires_grad=False)
            packed = pack(rows)
            if packed is None:
                for i, piece in enumerate(pieces):
                    weight[i * num_out : (i + 1) * num_out] = piece.weight
                return None
            packed.release_original()
            discard(weight[here])
            pieces.append(packed)
        return cls(original, pieces)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Return a copy of the weight."""
        return torch.cat([piece.weight for piece in self._pieces])

    @property
    def dtype(self) -> torch.dtype:
        """Return the weight's dtype, without the copy of `weight`."""
        return self._original[0].weight.dtype

    def panels(self) -> list[Panels] | None:
        """Return the pieces for our own loops; None if oneDNN's layout of any piece is not panels."""
        found = [panels for piece in self._pieces if (panels := piece.panels()) is not None]
        return found if len(found) == len(self._pieces) else None

    def release_original(self) -> None:
        """Free the original weight's memory."""
        self._original[0].weight.data = torch.empty(0, dtype=self.dtype)

    def unpack(self) -> nn.Module:
        """Restore the original module's weight."""
        if self._original[0].weight.numel() == 0:
            self._original[0].weight.data = self.weight
        return self._original[0]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece(input) for piece in self._pieces], -1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight


def outputs_of_piece(weight: torch.Tensor) -> int:
    """Return the outputs of a piece of a weight [num_out, num_in]: whole panels, at most sixteen pieces."""
    num_bytes = max(_PIECE_BYTES, weight.nbytes // _MOST_PIECES)
    panel_bytes = ElementFormat.of(weight.dtype).panel_bytes(weight.shape[1])
    return -(-num_bytes // panel_bytes) * PANEL
