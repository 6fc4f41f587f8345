"""Weights in panels of 64 outputs, the layout of our loops: by oneDNN if it uses this layout, else packed here."""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels


class Panels(NamedTuple):
    """A weight as [num_out / 64, depth / i, 64, i], with i inputs `interleaved` (element_format.py): 2 in bfloat16.

    packed  owns the memory: a tensor of oneDNN, or of `pack`
    depth   number of inputs with padding; padded inputs and outputs are 0
    """

    packed: torch.Tensor
    bias: torch.Tensor | None
    num_out: int
    num_in: int
    depth: int
    address: int
    num_bytes: int

    @property
    def loop(self) -> tuple[int, ...]:
        """Return the numbers of a segment that select the loop of this weight: that of the matmul."""
        return (0, 0, 0, 0, 0)

    @property
    def forms(self) -> int:
        """Return the forms of rows that a loop of its own reads: none."""
        return 0

    @property
    def is_mkldnn(self) -> bool:
        """Return True if oneDNN can multiply with these panels."""
        return self.packed.is_mkldnn


AnyPanels = Panels | QuantisedPanels


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Panels:
    """Copy a weight [num_out, num_in], float32 or bfloat16, into panels."""
    num_out, num_in = weight.shape
    pair = ElementFormat.of(weight.dtype).interleaved
    num_panels, depth = -(-num_out // PANEL), -(-num_in // 2) * 2
    packed = torch.zeros(num_panels, depth // pair, PANEL, pair, dtype=weight.dtype)
    for panel in range(num_panels):
        rows = weight[panel * PANEL : (panel + 1) * PANEL]
        if num_in < depth:
            rows = torch.nn.functional.pad(rows, (0, depth - num_in))
        packed[panel, :, : len(rows)] = rows.reshape(len(rows), depth // pair, pair).transpose(0, 1)
    return Panels(packed, bias, num_out, num_in, depth, packed.data_ptr(), packed.nbytes)


def unpack(panels: Panels) -> torch.Tensor:
    """Return the weight [num_out, num_in] of the panels of `pack`."""
    plain = panels.packed.transpose(1, 2).reshape(-1, panels.depth)
    return plain[: panels.num_out, : panels.num_in].contiguous()


def segment(
    first_panel: int, num_out: int, column: int, weight: AnyPanels, up: tuple[int, AnyPanels] | None = None
) -> list[int]:
    """Return a segment of a MatmulCall.

    up  address of an up projection, and the panels whose loop reads it
    """
    bias = weight.bias.data_ptr() if weight.bias is not None else 0
    address, of_up = up if up is not None else (0, None)
    loops = (*weight.loop, *(of_up.loop if of_up is not None else (0, 0, 0, 0, 0)))
    return [first_panel, num_out, column, weight.address, address, bias, *loops]
