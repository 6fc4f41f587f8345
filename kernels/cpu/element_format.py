"""ElementFormat: the memory format of weights, activations and keys in the CPU loops.

Every loop is compiled for one format. A new format needs its widening in loops/register_tiles.py. This module imports
no torch: processes compile loops without it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.kernels.cpu import PANEL

if TYPE_CHECKING:
    import torch


class ElementFormat(IntEnum):
    """A format of elements; its number is part of the names of its loops on disk."""

    FLOAT32 = 0
    BFLOAT16 = 1

    __repr__ = int.__repr__  # an argument in the programs that compile loops

    @classmethod
    def of(cls, dtype: torch.dtype | str) -> ElementFormat:
        """Return the format of a torch dtype or its name; KeyError if no loop has it."""
        return cls[str(dtype).removeprefix("torch.").upper()]

    @property
    def bits(self) -> int:
        """Return the bits of an element."""
        return {ElementFormat.FLOAT32: 32, ElementFormat.BFLOAT16: 16}[self]

    @property
    def size(self) -> int:
        """Return the bytes of an element."""
        return self.bits // 8

    @property
    def interleaved(self) -> int:
        """Return the adjacent inputs of an output in a panel: as many as fill 32 bits."""
        return 32 // self.bits

    @property
    def raw(self) -> Any:
        """Return the numpy type that holds an element: bfloat16 is held as uint16."""
        return {ElementFormat.FLOAT32: np.float32, ElementFormat.BFLOAT16: np.uint16}[self]

    def panel_bytes(self, depth: int) -> int:
        """Return the bytes of a panel: PANEL outputs of `depth` inputs."""
        return PANEL * depth * self.bits // 8
