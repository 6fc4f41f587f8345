"""GridPositions: the positions of a multimodal rotary embedding, by the model's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.model.transformers_lock import importing_transformers
from graftlm.core.prompt_input import PromptInput, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_POSITIONS = 256
"""Prompts' pictures of which positions are kept, 24 bytes a token."""

_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Inputs that decide positions."""


class GridPositions:
    """Positions of one model's prompts. They are computed once for the pictures of a prompt: text behind counts on."""

    def __init__(self, model_config: Any) -> None:
        self._config = model_config
        self._known: dict[tuple[tuple[int, int, bytes], ...], NDArray[np.int64]] = {}

    def of(self, ids: NDArray[np.int32], spans: tuple[Span, ...]) -> NDArray[np.int64] | None:
        """Return time, height and width of each token, int64 [3, num_tokens]; None for a model of one dimension."""
        key = tuple((span.start, span.stop, span.digest) for span in spans)
        behind = spans[-1].stop + 1  # one token of text
        known = self._known.get(key)
        if known is None:
            known = self._computed(ids[:behind], spans)
            if known is None or len(ids) < behind or len({*known[:, -1].tolist()}) > 1:
                return self._computed(ids, spans)
            if len(self._known) >= _MOST_POSITIONS:
                self._known.clear()
            self._known[key] = known
        more = known[:, -1:] + np.arange(1, len(ids) - behind + 1)
        return np.concatenate([known, more], 1)

    def _computed(self, ids: NDArray[np.int32], spans: tuple[Span, ...]) -> NDArray[np.int64] | None:
        index = self._rope_index
        if index is None:
            return None
        import torch

        types, model_ids = np.zeros(len(ids), np.int64), PromptInput(ids, spans).model_ids.astype(np.int64)
        for span in spans:
            kind = span.values.item.kind
            types[span.start : span.stop] = 1 if kind == "image" else 2
        given: dict[str, Any] = {
            "input_ids": torch.from_numpy(model_ids)[None],
            "mm_token_type_ids": torch.from_numpy(types)[None],
        }
        items = [span.values.item for span in spans if span.values.first == 0]
        for name in _GRIDS:
            found = [torch.as_tensor(item.inputs[name]) for item in items if name in item.inputs]
            if found:
                given[name] = torch.cat(found)
        known = inspect.signature(index).parameters
        positions, _ = index(**{name: value for name, value in given.items() if name in known})
        table: NDArray[np.int64] = positions[:, 0].numpy()
        return table

    @cached_property
    def _rope_index(self) -> Callable[..., Any] | None:
        """Return the model's own function of positions, on a model without weights."""
        from torch import nn

        with importing_transformers():
            from transformers import MODEL_MAPPING

            cls: Any = MODEL_MAPPING.get(type(self._config), None)
        if cls is None or not hasattr(cls, "get_rope_index"):
            return None
        model: Any = cls.__new__(cls)
        nn.Module.__init__(model)
        model.config = self._config
        index: Callable[..., Any] = model.get_rope_index
        return index
