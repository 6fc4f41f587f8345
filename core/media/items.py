"""MediaItem: a processed picture or video, and its place in a prompt's token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from graftlm.core.prompt_input import Span, ids_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.chat.messages import ImagePart, VideoPart

Kind = Literal["image", "video"]


class Form(NamedTuple):
    """The facts that decide a picture's text: its sides in pixels, and options of its own, None for the runtime's."""

    width: int
    height: int
    options: Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class MediaItem:
    """A picture or a video as the model's processor prepared it, alone.

    kind            of the model's input: the frames of a video are images to some models
    digest          32 bytes: of the pixels and of all options of the processor
    text            takes the place of the marker in a rendered prompt
    ids             int32, the ids of `text`, with the placeholder's id for each embedding
    num_embeddings  embeddings that the model computes of `inputs`
    placeholder     the token id that stands for an embedding in the model's own prompts
    inputs          tensors of the model's encoder by name, on the host
    alone           whether `ids` may be put between the ids of the texts before and after the marker
    levels          float32 [3, 256]: the encoder's input for each byte of a color; None if `inputs` are final
    form            of a picture; None of a video
    """

    kind: Kind
    digest: bytes
    text: str
    ids: NDArray[np.int32] = field(repr=False)
    num_embeddings: int
    placeholder: int
    inputs: Mapping[str, Any] = field(repr=False)
    alone: bool
    levels: Any = field(default=None, repr=False)
    form: Form | None = None

    def tensors(self) -> dict[str, Any]:
        """Return the inputs as the model's own processor makes them."""
        pixels = {name: spread(x, self.levels) for name, x in self.inputs.items() if is_bytes(x)}
        return {**self.inputs, **pixels}

    @property
    def num_bytes(self) -> int:
        return sum(getattr(value, "nbytes", 0) for value in self.inputs.values())

    def runs(self, cuts: NDArray[np.int64]) -> Runs:
        """Return the runs of embeddings that begin at 0 and at `cuts`; those of the last call are kept."""
        key = cuts.tobytes()
        kept: Runs | None = self.__dict__.get("_runs")
        if kept is None or kept.key != key:
            kept = self.__dict__["_runs"] = Runs.of(self, cuts)
        return kept


def is_bytes(value: Any) -> bool:
    """Return True for the pixels of an item with `levels`."""
    return str(getattr(value, "dtype", "")) == "torch.uint8"


def spread(pixels: Any, levels: Any) -> Any:
    """Return the values of pixels, uint8 [num_patches, 3 * n], the columns of a color side by side.

    levels  float32 [3, 256]
    -> [num_patches, 3 * n], float32, on the device of the pixels
    """
    import torch

    colors = pixels.view(len(pixels), 3, -1).int() + 256 * torch.arange(3, device=pixels.device)[:, None]
    return levels.to(pixels.device).flatten()[colors].flatten(1)


class MediaRun(NamedTuple):
    """Consecutive embeddings of an item: those from `first` on."""

    item: MediaItem
    first: int


class Runs(NamedTuple):
    """The runs of consecutive embeddings of an item, the same in each prompt.

    key     of their begins
    firsts  the first embedding of each
    ids     int32 [num_embeddings], of all tokens
    """

    key: bytes
    firsts: tuple[int, ...]
    digests: tuple[bytes, ...]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, item: MediaItem, cuts: NDArray[np.int64]) -> Runs:
        firsts = (0, *cuts.tolist())
        parts = [item.digest + first.to_bytes(8, "little") for first in firsts]
        digests = tuple(hashlib.blake2b(part, digest_size=32).digest() for part in parts)
        stops = (*firsts[1:], item.num_embeddings)
        ids = [ids_of(*run) for run in zip(digests, np.subtract(stops, firsts).tolist(), strict=True)]
        return cls(cuts.tobytes(), firsts, digests, np.concatenate(ids))


class MediaText(str):
    """A rendered prompt with one marker for each of `parts`, in order.

    places  the place of each part, such as "message 2", for errors
    """

    __slots__ = ("parts", "places")
    parts: tuple[ImagePart | VideoPart, ...]
    places: tuple[str, ...]

    @classmethod
    def of(cls, text: str, parts: Sequence[ImagePart | VideoPart], places: Sequence[str] = ()) -> MediaText:
        made = cls(text)
        made.parts, made.places = tuple(parts), tuple(places)
        return made


def place(
    ids: NDArray[np.int32], items: Sequence[MediaItem], placeholders: Sequence[int], offset: int = 0
) -> tuple[NDArray[np.int32], tuple[Span, ...]]:
    """Replace placeholders by the ids of spans, one span for each run of embeddings.

    ids           with the placeholders of all `items`, in order
    placeholders  the ids that stand for an embedding
    offset        tokens of the prompt before `ids`

    Raises: ValueError unless the placeholders are as many as the embeddings.
    """
    at = np.flatnonzero(np.isin(ids, placeholders))
    if len(at) != (wanted := sum(item.num_embeddings for item in items)):
        raise ValueError(f"{len(at)} placeholders of {wanted} embeddings")
    ids, spans, begin = ids.copy(), [], 0
    for item in items:
        own = at[begin : begin + item.num_embeddings]
        begin += item.num_embeddings
        cuts = np.flatnonzero(np.diff(own) > 1) + 1
        runs = item.runs(cuts)
        ids[own] = runs.ids
        starts = (own[[0, *cuts]] + offset).tolist()
        stops = (own[[*(cuts - 1), -1]] + offset + 1).tolist()
        for first, start, stop, digest in zip(runs.firsts, starts, stops, runs.digests, strict=True):
            spans.append(Span(start, stop, digest, MediaRun(item, first)))
    return ids, tuple(spans)
