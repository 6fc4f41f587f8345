"""Vision: a model's encoder of pictures, its outputs kept by digest, and the way of the outputs into a step."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from graftlm.core.errors import EngineError
from graftlm.core.execution.grid_tables import GridTables
from graftlm.core.execution.packed_attention import PackedAttention
from graftlm.core.media.items import is_bytes, spread

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


MOST_NUMBERS = 1 << 24
"""Numbers of the pictures that are encoded in one call: three pictures of a megapixel, or as many as the largest has.

All pictures of a step are encoded in it, so fewer calls keep streams waiting no longer; memory bounds them.
"""


class Vision:
    """A model's encoder of pictures and videos.

    Features are kept by the item's digest, the least recently used go first; those of the step at hand always stay.

    max_bytes   limit of the kept features
    batches     whether pictures of one shape may be encoded in one call
    most_numbers  numbers of the pictures that are encoded in one call
    tables      what the encoder computes of grids alone; None for an encoder that takes none
    work_bytes  memory that the encoder takes while it runs, beside the weights; 0 where it was not measured
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        self.model, self.max_bytes = model, max_bytes
        self.batches, self.work_bytes = False, 0
        self.most_numbers = MOST_NUMBERS
        self.tables: GridTables | None = None
        self.num_bytes = self.num_encoded = 0
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self._inner: Any = getattr(model, "model", model)
        config: Any = model.config
        self._by_ids = bool(getattr(config.get_text_config(), "hidden_size_per_layer_input", 0))
        self._in_lists = False
        self._packed = PackedAttention(model)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the encoder's inputs."""
        dtype: torch.dtype = self._inner.dtype
        return dtype

    def features(self, items: Sequence[MediaItem]) -> list[Features]:
        """Return the embeddings of items: kept ones, or computed now."""
        missing = {item.digest: item for item in items if item.digest not in self._kept}
        for batch in self.batched(list(missing.values())):
            for item, made in zip(batch, self.encode(batch), strict=True):
                self.num_encoded += 1
                self._kept[item.digest] = made
                self.num_bytes += made.num_bytes
        for item in items:
            self._kept.move_to_end(item.digest)
        return [self._kept[item.digest] for item in items]

    @property
    def reserved_bytes(self) -> int:
        """Memory of the device that pictures take beside the weights; on a CPU the KV pool leaves enough."""
        return self.work_bytes + self.max_bytes if self.work_bytes else 0

    def forget(self) -> None:
        """Drop all kept features, and count from 0."""
        self._kept.clear()
        self.num_bytes = self.num_encoded = 0

    def _trim(self) -> None:
        while self.num_bytes > self.max_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.num_bytes

    def batched(self, items: Sequence[MediaItem]) -> list[list[MediaItem]]:
        """Partition items into those that are encoded in one call each."""
        if not self.batches:
            return [[item] for item in items]
        found: list[list[MediaItem]] = []
        filling: dict[Any, list[MediaItem]] = {}
        room: dict[Any, int] = {}
        for item in items:
            shapes = tuple((name, tuple(value.shape[1:])) for name, value in sorted(item.inputs.items()))
            key = item.digest if _is_several(item) else (item.kind, shapes)
            size = self.size_of(item)
            if key not in filling or room[key] < size:
                filling[key], room[key] = [], self.most_numbers
                found.append(filling[key])
            filling[key].append(item)
            room[key] -= size
        return found

    @staticmethod
    def size_of(item: MediaItem) -> int:
        """Return the numbers of an item's inputs."""
        return sum(value.numel() for value in item.inputs.values())

    def encode(self, items: Sequence[MediaItem]) -> list[Features]:
        """Compute the embeddings of items by one call of the encoder."""
        encode = getattr(self._inner, f"get_{items[0].kind}_features")
        known = inspect.signature(inspect.unwrap(encode)).parameters
        given, segments = self._arguments(items, known)
        with self._packed(segments):
            output: Any = encode(**given, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        self._in_lists = bool(deep) and isinstance(deep[0], list | tuple)
        pooled = getattr(output, "pooler_output", None)
        if pooled is None:  # Llama 4's forward projects outside of its encoder
            pooled = self._inner.multi_modal_projector(_flat(output.last_hidden_state))
        layers = [_flat(layer) for layer in (pooled, *deep)]
        counts = [item.num_embeddings for item in items]
        newline = getattr(self._inner, "image_newline", None)
        if items[0].kind == "video" and newline is not None and len(layers[0]) == counts[0] - 1:
            layers = [torch.cat([layers[0], newline[None]])]  # LLaVA-OneVision's forward adds it in older versions
        if {len(layer) for layer in layers} != {sum(counts)}:
            raise EngineError(
                f"the model's encoder made {sorted(map(len, layers))} embeddings of pictures with {sum(counts)} tokens"
            )
        split = [layer.split(counts) for layer in layers]
        whole = len(items) == 1
        return [
            Features(of_item if whole else tuple(x.clone() for x in of_item)) for of_item in zip(*split, strict=True)
        ]

    def _arguments(self, items: Sequence[MediaItem], known: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the arguments of the encoder's call among those `known`, and the sequences of its attention.

        Grids stay on the host where the encoder gets tables of them.
        """
        device, given, segments = self._inner.device, {}, None
        for name in items[0].inputs:
            values = [item.inputs[name] for item in items]
            if name not in known and name == "pixel_values_videos":
                name = "pixel_values"  # the name in older versions of transformers
            if name in known and name.endswith("grid_thw") and self.tables is not None:
                given[name] = torch.cat(values)
                tables, segments = self.tables.of(given[name], device)
                given.update(tables)
            elif name in known:
                moved = [x.to(device, self.dtype if x.is_floating_point() else x.dtype) for x in values]
                whole = moved[0] if len(moved) == 1 else torch.cat(moved)
                given[name] = spread(whole, items[0].levels).to(self.dtype) if is_bytes(whole) else whole
        return given, segments

    def inputs(self, plan: WirePlan, input_ids: torch.Tensor) -> VisionInputs:
        """Encode the step's pictures that are not kept, and return the arguments of the model's forward.

        input_ids  int64 [num_tokens], on the device
        """
        kinds: dict[Kind, list[tuple[torch.Tensor, ...]]] = {}
        embedded = sorted(plan.embedded, key=lambda rows: rows.start)
        features = self.features([rows.item for rows in embedded])
        parts = [
            tuple(layer[rows.first : rows.first + rows.stop - rows.start] for layer in of_item.layers)
            for rows, of_item in zip(embedded, features, strict=True)
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


def _is_several(item: MediaItem) -> bool:
    """Return True for an item that is encoded as several, or as a picture among several (LLaVA-OneVision)."""
    count = item.inputs.get("batch_num_images")
    return item.kind == "video" or (count is not None and int(count.sum()) > 1)


def _flat(pooled: Any) -> torch.Tensor:
    """Return embeddings [n, hidden_size] of a list by picture, or of [n, tokens, hidden_size]."""
    if isinstance(pooled, list | tuple):
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in pooled])
    flat: torch.Tensor = pooled.reshape(-1, pooled.shape[-1])
    return flat
