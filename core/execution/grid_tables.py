"""GridTables: an encoder's tables that depend on the grids of its pictures alone, computed once for each grid.

Such an encoder reads the sizes of its pictures from the device several times a call, in Python loops, and each reading
waits for all that runs there. transformers takes the results as arguments, under the names that it gives them.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from graftlm.core.execution.packed_attention import Segments

_MOST = 16
"""Tables that are kept: a few megabytes each for a full call."""


class Tables(NamedTuple):
    """The tables of a call.

    arguments  of the encoder, by name, on the device
    segments   the sequences of its attention, by the id of their offsets
    """

    arguments: dict[str, Any]
    segments: dict[int, tuple[torch.Tensor, Segments]]


class GridTables:
    """Tables of one model's encoder; of none where transformers has no functions for them."""

    def __init__(self, model: nn.Module) -> None:
        encoders = [m for m in model.modules() if "grid_thw" in inspect.signature(m.forward).parameters]
        self._encoder: Any = encoders[0] if len(encoders) == 1 else None
        self._kept: OrderedDict[Any, Tables] = OrderedDict()

    def of(self, grids: torch.Tensor, device: torch.device) -> Tables:
        """Return the tables of grids, int64 [num_pictures, 3] on the host, least recently used first to go.

        Raises any error for an encoder that lacks the sizes which its functions need.
        """
        key = tuple(map(tuple, grids.tolist()))
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._made(grids, device)
        self._kept.move_to_end(key)
        while len(self._kept) > _MOST:
            self._kept.popitem(last=False)
        return found

    def _made(self, grids: torch.Tensor, device: torch.device) -> Tables:
        arguments: dict[str, Any] = {}
        segments = {}
        for name, value in self._computed(grids) if self._encoder is not None else ():
            moved = arguments[name] = value.to(device)
            if name in _LONGEST:
                sequences = Segments.of(value, device)
                segments[id(moved)] = moved, sequences
                if hasattr(self._source, "get_max_seqlen"):
                    arguments[_LONGEST[name]] = sequences.longest
        return Tables(arguments, segments)

    @property
    def _source(self) -> Any:
        return sys.modules[type(self._encoder).__module__]

    def _computed(self, grids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        from transformers import vision_utils

        encoder, source = self._encoder, self._source
        merge = encoder.spatial_merge_size
        if hasattr(source, "get_vision_position_ids"):
            yield "position_ids", vision_utils.get_vision_position_ids(grids, merge)
        if hasattr(source, "get_vision_attention_seqlens") or hasattr(source, "get_vision_cu_seqlens"):
            yield "cu_seqlens", vision_utils.get_vision_cu_seqlens(grids)
        if hasattr(source, "get_vision_window_index"):
            found = vision_utils.get_vision_window_index(grids, merge, encoder.window_size, encoder.patch_size)
            yield from zip(("window_index", "cu_window_seqlens"), found, strict=True)
        if hasattr(source, "get_vision_interpolation_indices_and_weights"):
            made = vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                num_grid_per_side=encoder.num_grid_per_side,
                mode=encoder.interpolation_mode,
                align_corners=encoder.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            yield from zip(("interp_indices", "interp_weights"), made, strict=True)


_LONGEST = {"cu_seqlens": "max_seqlen", "cu_window_seqlens": "max_window_seqlen"}
"""Names of offsets, and of the length of their longest sequence."""
