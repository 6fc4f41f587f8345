"""PromptInput: the token ids of a prompt, and the spans among them that stand for other values than text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, slots=True)
class Span:
    """Consecutive tokens of a prompt that stand for other values than text, such as the patches of an image.

    start, stop  token positions in the prompt
    digest       identity of the values: equal digests mean equal values. At least 16 bytes
    values       what the model takes in place of the tokens; of pictures and videos a MediaRun (core/media/items.py)
    """

    start: int
    stop: int
    digest: bytes
    values: Any

    @property
    def ids(self) -> NDArray[np.int32]:
        """The ids of the span's tokens, derived from the digest, int32 [stop - start].

        They are negative, so they equal no token id. The radix tree and the scheduler use them as any other ids.
        """
        stream = hashlib.shake_256(self.digest).digest(4 * (self.stop - self.start))
        return np.frombuffer(stream, np.int32) | np.int32(np.iinfo(np.int32).min)


BothWays = Literal["", "all", "windowed"]
"""Layers in which the tokens of a span attend to each other in both directions: none, all, those with a window."""


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Positions and attention of a prompt with spans, where they are not those of text.

    positions  int64 [3, num_tokens]: time, height and width of a multimodal rotary embedding; None: 0, 1, 2, ...
               A prompt that was cut or extended has fewer or more tokens.
    delta      position of each later token minus its index
    both_ways  the layers in which tokens of a span see the whole span
    """

    positions: NDArray[np.int64] | None = None
    delta: int = 0
    both_ways: BothWays = ""

    def position(self, index: int) -> int:
        """Return the position of a token of text."""
        positions = self.positions
        if positions is not None and index < positions.shape[1]:
            return int(positions[0, index])
        return index + self.delta


@dataclass(frozen=True, eq=False, slots=True)
class PromptInput:
    """A prompt as an engine computes it.

    ids     int32 [num_tokens]; negative within spans
    spans   in the order of their positions; none in a prompt of text
    layout  None for the positions and the attention of text

    Raises ConfigError unless the ids of each span are those derived from its digest.
    """

    ids: NDArray[np.int32]
    spans: tuple[Span, ...] = ()
    layout: Layout | None = None

    def __post_init__(self) -> None:
        for span in self.spans:
            if not np.array_equal(self.ids[span.start : span.stop], span.ids):
                raise ConfigError(
                    f"the prompt's ids {span.start} to {span.stop} are not those of the span there; take Span.ids"
                )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def model_ids(self) -> NDArray[np.int32]:
        """The ids as the model's own processor gives them: within spans the placeholder."""
        ids = self.ids.copy()
        for span in self.spans:
            ids[span.start : span.stop] = span.values.item.placeholder
        return ids

    def extended(self, ids: Sequence[int]) -> PromptInput:
        """Return this prompt followed by text tokens."""
        if not len(ids):
            return self
        return PromptInput(np.concatenate([self.ids, np.asarray(ids, np.int32)]), self.spans, self.layout)

    def without_last(self) -> PromptInput:
        """Return this prompt without its last token, which belongs to no span."""
        return PromptInput(self.ids[:-1], self.spans, self.layout)
