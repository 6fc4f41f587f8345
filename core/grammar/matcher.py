"""Matcher: the interface between grammar engines, native or not, and the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

MaskRow: TypeAlias = "npt.NDArray[np.int32]"

NO_ENDING = 1 << 40
"""The `min_tokens_to_accept` of a matcher that found no ending."""


class Matcher(Protocol):
    """The state of one sequence in its grammar. Not thread-safe; a fork is independent."""

    def fill_mask(self, row: MaskRow) -> bool:
        """Write the token mask of the next token into `row`.

        row  int32 [ceil(vocab_size / 32)]: bit `i % 32` of word `i // 32` is set when token i is allowed
        -> False when every token is allowed and `row` need not be applied. End-of-sequence ids are allowed exactly in
        accepting states.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the first that the grammar does not allow. -> how many were consumed"""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` consumed tokens; ValueError when fewer were consumed."""
        ...

    def fork(self) -> Matcher:
        """An independent matcher in the same state."""
        ...

    def forced(self, context: Sequence[int]) -> list[int]:
        """Forced tokens for jump-forward decoding, healed: canonical after `context` (the ids of prompt and output).

        Bytes that a longer token could still take are held back, so appending the tokens never changes how the
        finished text is tokenized. Nothing is consumed. [] when nothing is forced.
        """
        ...

    def forced_bytes(self) -> bytes:
        """The bytes that must come next, before healing."""
        ...

    def min_tokens_to_accept(self) -> int:
        """An upper bound on the tokens of `ending` from here, end-of-sequence not counted; 0 when accepting.

        NO_ENDING or more where a search found no ending; the matcher still has that of the position before.
        """
        ...

    def ending(self, context: Sequence[int]) -> list[int]:
        """Tokens of the shortest path to an accepting state: at most `min_tokens_to_accept()` of them."""
        ...

    @property
    def accepting(self) -> bool:
        """The text so far is complete: end-of-sequence is allowed."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing can follow but end-of-sequence, or it was consumed already."""
        ...


def ends_within(matcher: Matcher, num_tokens: int) -> bool:
    """Whether the shortest ending takes at most `num_tokens` tokens.

    Searching for an ending costs about a millisecond in a new state. A matcher whose `ending_bound()` is a quick upper
    bound on its length only searches where that leaves the question open.
    """
    bound: Callable[[], int] | None = getattr(matcher, "ending_bound", None)
    return bound is not None and bound() <= num_tokens or matcher.min_tokens_to_accept() <= num_tokens
