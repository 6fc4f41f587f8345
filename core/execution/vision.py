"""Vision: a model's encoder of pictures, its outputs kept by digest, and the way of the outputs into a step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graftlm.core.errors import EngineError

if TYPE_CHECKING:
    from graftlm.core.media.items import Kind, MediaItem
    from graftlm.kernels.wire_plan import WirePlan

VisionInputs = AbstractContextManager[dict[str, Any]]
"""Gives the arguments of the model's forward in place of its token ids, for the time of the call."""


class Features(NamedTuple):
    """The embeddings of an item, [num_embeddings, hidden_size]: those before the first layer, then those that are
    added after the first layers (deepstack)."""

    layers: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class Vision:
    """A model's encoder of pictures and videos.

    Features are kept by the item's digest, the least recently used go first; those of the step at hand always stay.

    max_bytes  limit of the kept features
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        self.model, self.max_bytes = model, max_bytes
        self.num_bytes = self.num_encoded = 0
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self._inner: Any = model.model
        config: Any = model.config
        self._by_ids = bool(getattr(config.get_text_config(), "hidden_size_per_layer_input", 0))
        self._in_lists = False

    def features(self, item: MediaItem) -> Features:
        """Return the embeddings of an item: kept ones, or computed now."""
        found = self._kept.get(item.digest)
        if found is not None:
            self._kept.move_to_end(item.digest)
            return found
        made = self._encode(item)
        self.num_encoded += 1
        self._kept[item.digest] = made
        self.num_bytes += made.num_bytes
        return made

    def forget(self) -> None:
        """Drop all kept features, and count from 0."""
        self._kept.clear()
        self.num_bytes = self.num_encoded = 0

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.num_bytes

    def _encode(self, item: MediaItem) -> Features:
        encode = getattr(self._inner, f"get_{item.kind}_features")
        known = inspect.signature(inspect.unwrap(encode)).parameters
        dtype, device = self._inner.dtype, self._inner.device
        given: dict[str, Any] = {}
        for name, value in item.inputs.items():
            if name not in known and name == "pixel_values_videos":
                name = "pixel_values"  # the name in older versions of transformers
            if name in known:
                given[name] = value.to(device, dtype) if value.is_floating_point() else value.to(device)
        output: Any = encode(**given, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        self._in_lists = bool(deep) and isinstance(deep[0], list | tuple)
        layers = tuple(_flat(layer) for layer in (output.pooler_output, *deep))
        counts = {len(layer) for layer in layers}
        if counts != {item.num_embeddings}:
            raise EngineError(
                f"the model's encoder made {sorted(counts)} embeddings of a picture with {item.num_embeddings} tokens"
            )
        return Features(layers)

    def inputs(self, plan: WirePlan, input_ids: torch.Tensor) -> VisionInputs:
        """Encode the step's pictures that are not kept, and return the arguments of the model's forward.

        input_ids  int64 [num_tokens], on the device
        """
        kinds: dict[Kind, list[tuple[torch.Tensor, ...]]] = {}
        embedded = sorted(plan.embedded, key=lambda rows: rows.start)
        parts = [
            tuple(layer[rows.first : rows.first + rows.stop - rows.start] for layer in self.features(rows.item).layers)
            for rows in embedded
        ]
        self._trim()
        for rows, layers in zip(embedded, parts, strict=True):
            kinds.setdefault(rows.item.kind, []).append(layers)
        if self._by_ids or any(len(layers) > 1 for layers in parts):
            whole = {kind: [torch.cat(each) for each in zip(*of_kind, strict=True)] for kind, of_kind in kinds.items()}
            ids = input_ids.clone()
            for rows in embedded:
                ids[rows.start : rows.stop] = rows.item.placeholder
            return self._through_encoder(ids, whole)
        embeds = self.model.get_input_embeddings()(input_ids).clone()  # type: ignore[operator]
        for rows, layers in zip(embedded, parts, strict=True):
            embeds[rows.start : rows.stop] = layers[0].to(embeds.dtype)
        return _given({"inputs_embeds": embeds[None]})

    @contextmanager
    def _through_encoder(
        self, ids: torch.Tensor, layers: Mapping[Kind, list[torch.Tensor]]
    ) -> Iterator[dict[str, Any]]:
        """Let the model's forward take `layers` for the output of its encoder, which it adds where it needs them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        given: dict[str, Any] = {"input_ids": ids[None]}
        names = [f"get_{kind}_features" for kind in layers]
        for kind, (first, *deep) in layers.items():
            output: Any = BaseModelOutputWithPooling(pooler_output=[first])  # type: ignore[arg-type]
            output.deepstack_features = [[layer] if self._in_lists else layer for layer in deep]
            given["pixel_values" if kind == "image" else "pixel_values_videos"] = first
            vars(self._inner)[f"get_{kind}_features"] = lambda *args, _output=output, **options: _output
        try:
            yield given
        finally:
            for name in names:
                vars(self._inner).pop(name, None)


@contextmanager
def _given(arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield arguments


def _flat(pooled: Any) -> torch.Tensor:
    """Return embeddings [n, hidden_size] of a list by picture, or of [n, tokens, hidden_size]."""
    if isinstance(pooled, list | tuple):
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in pooled])
    flat: torch.Tensor = pooled.reshape(-1, pooled.shape[-1])
    return flat
