"""Sequences of grammars, for replies in which one value is context-free; each grammar keeps its own engine.

llguidance compiles the schemas that no automaton can hold, but does not find the shortest ending of free text. Text and
typed fields therefore stay automata, llguidance compiles that schema, and a chain leads from one to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from graftlm.core.grammar.matcher import MaskRow, Matcher


class Grammar(Protocol):
    """A compiled constraint."""

    def matcher(self) -> Matcher: ...


class Chain:
    """A sequence of grammars whose outputs are concatenated. No token spans two of them."""

    def __init__(self, grammars: Sequence[Grammar], eos_token_ids: Sequence[int]) -> None:
        self._grammars = list(grammars)
        self._eos_token_ids = tuple(eos_token_ids)

    def matcher(self) -> ChainMatcher:
        return ChainMatcher([grammar.matcher() for grammar in self._grammars], self._eos_token_ids)


class ChainMatcher:
    """A matcher of one sequence in a chain; implements `graftlm.core.grammar.matcher.Matcher`.

    The state is in one link; when that link accepts, the next one may begin as well.
    """

    def __init__(self, links: list[Matcher], eos_token_ids: tuple[int, ...]) -> None:
        self._links = links
        self._eos_token_ids = eos_token_ids
        self._at = 0
        self._taken: list[int] = []  # the link of each consumed token
        self._later = [0] * len(links)  # num_tokens that the links after each one need
        for i in range(len(links) - 1, 0, -1):
            self._later[i - 1] = self._later[i] + links[i].min_tokens_to_accept()

    def fill_mask(self, row: MaskRow) -> bool:
        row[:] = 0
        for i in self._open():
            allowed = np.zeros_like(row)
            if not self._links[i].fill_mask(allowed):
                allowed[:] = -1
            if i < len(self._links) - 1:  # an end-of-text token ends the chain, not a link inside it
                for token_id in self._eos_token_ids:
                    allowed.view(np.uint32)[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
            row |= allowed
        return True

    def advance(self, token_ids: Sequence[int]) -> int:
        for num_consumed, token_id in enumerate(token_ids):
            taken = next((i for i in self._open() if self._links[i].advance([token_id])), None)
            if taken is None:
                return num_consumed
            self._at = taken
            self._taken.append(taken)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens <= len(self._taken):
            raise ValueError(f"cannot undo {num_tokens} tokens; {len(self._taken)} were consumed")
        for _ in range(num_tokens):
            self._links[self._taken.pop()].rollback(1)
        self._at = self._taken[-1] if self._taken else 0

    def fork(self) -> ChainMatcher:
        twin = ChainMatcher([link.fork() for link in self._links], self._eos_token_ids)
        twin._at, twin._taken, twin._later = self._at, self._taken.copy(), self._later
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        return self._links[i[0]].forced(context) if len(i := self._open()) == 1 else []

    def forced_bytes(self) -> bytes:
        return self._links[i[0]].forced_bytes() if len(i := self._open()) == 1 else b""

    def min_tokens_to_accept(self) -> int:
        return self._links[self._at].min_tokens_to_accept() + self._later[self._at]

    def ending(self, context: Sequence[int]) -> list[int]:
        ids: list[int] = []
        for link in self._links[self._at :]:
            ids += link.ending([*context, *ids])
        return ids

    @property
    def accepting(self) -> bool:
        return self._open()[-1] == len(self._links) - 1 and self._links[-1].accepting

    @property
    def finished(self) -> bool:
        return self._at == len(self._links) - 1 and self._links[-1].finished

    def _open(self) -> list[int]:
        """Return the indices of the links that can consume the next token; finished links are skipped."""
        links = [self._at]
        while links[-1] < len(self._links) - 1 and self._links[links[-1]].accepting:
            links.append(links[-1] + 1)
        return [i for i in links if i == links[-1] or not self._links[i].finished]
