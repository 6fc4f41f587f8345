"""PromptInput: the token ids of a prompt, and the spans among them that stand for other values than text."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
        return ids_of(self.digest, self.stop - self.start)


@functools.lru_cache(maxsize=512)
def ids_of(digest: bytes, count: int) -> NDArray[np.int32]:
    """Return the ids of `count` tokens. Kept: a picture's are asked for several times in each of its prompts."""
    ids = np.frombuffer(hashlib.shake_256(digest).digest(4 * count), np.int32) | np.int32(np.iinfo(np.int32).min)
    ids.flags.writeable = False
    return ids


def _joined(parts: Iterable[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(list(parts))


BothWays = Literal["", "all", "windowed"]
"""Layers in which the tokens of a span attend to each other in both directions: none, all, those with a window."""


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Positions and attention of a prompt with spans or modules, where they are not those of text.

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

    ids      int32 [num_tokens]; negative within spans
    spans    in the order of their positions; none in a prompt of text
    layout   None for the positions and the attention of text
    modules  the number of tokens of each module that the prompt begins with (`composed`); none in other prompts

    Raises ConfigError unless the ids of each span are those derived from its digest.
    """

    ids: NDArray[np.int32]
    spans: tuple[Span, ...] = ()
    layout: Layout | None = None
    modules: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        spans = self.spans
        if not spans or np.array_equal(_joined(self.of_span(one) for one in spans), _joined(one.ids for one in spans)):
            return
        wrong = next(one for one in spans if not np.array_equal(self.of_span(one), one.ids))
        raise ConfigError(
            f"the prompt's ids {wrong.start} to {wrong.stop} are not those of the span there; take Span.ids"
        )

    def of_span(self, span: Span) -> NDArray[np.int32]:
        """Return the ids of a span's tokens."""
        return self.ids[span.start : span.stop]

    @classmethod
    def composed(cls, modules: Sequence[NDArray[np.int32]], rest: NDArray[np.int32]) -> PromptInput:
        """Return a prompt of modules, and text that attends to all of them.

        The KV of a module is that of a prompt of the module alone, from position 0 on, wherever it stands. The rest
        begins at the position after the longest module. Raises ConfigError if there is no module, or no text after.
        """
        sizes = tuple(map(len, modules))
        if not sizes or not all(sizes) or not len(rest):
            raise ConfigError(f"a prompt of modules of {sizes} tokens and {len(rest)} others; each needs at least one")
        ids = np.concatenate([*modules, rest]).astype(np.int32, copy=False)
        return cls(ids, layout=Layout(delta=max(sizes) - sum(sizes)), modules=sizes)

    @property
    def of_modules(self) -> list[NDArray[np.int32]]:
        """The ids of each module."""
        stops = np.cumsum(self.modules)
        return [self.ids[stop - size : stop] for stop, size in zip(stops, self.modules, strict=True)]

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
        return replace(self, ids=np.concatenate([self.ids, np.asarray(ids, np.int32)]))

    def without_last(self) -> PromptInput:
        """Return this prompt without its last token, which belongs to no span."""
        return replace(self, ids=self.ids[:-1])
