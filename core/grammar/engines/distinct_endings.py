"""How a text ends whose items must differ: the base's ending where it repeats none, else a search beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

MAX_STEPS = 3_000
"""Tokens that are tried before a search gives up."""
MAX_TOKENS = 2_048
"""Tokens of an ending; of longer ones none is found."""
_MAX_TRIED = 48
"""Other tokens that are tried at one place."""
_MAX_DEPTH = 60
"""Places of one text at which a search has gone another way than the base."""


class Probe(Protocol):
    """A matcher that is moved about."""

    @property
    def accepting(self) -> bool: ...

    def num_items(self) -> list[int]:
        """How many items, or names that must differ, there are in each open array and object, the outermost first."""
        ...

    def base_ending(self) -> list[int]:
        """The shortest ending for what does not know that items must differ."""
        ...

    def plain_ending(self) -> list[int] | None:
        """The same if it repeats no item; else None."""
        ...

    def base_distance(self) -> int:
        """How many tokens that has."""
        ...

    def step(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to the first that is not allowed or repeats an item. -> how many were consumed"""
        ...

    def rollback(self, num_tokens: int) -> None: ...

    def other_items(self) -> Iterable[list[int]]:
        """Ways in which the item or name at hand may go on so that it differs from those before."""
        ...

    def fresh(self) -> Iterable[list[int]]:
        """What may come next so that the item at hand becomes another one."""
        ...

    def allowed(self) -> list[int]:
        """The tokens that the base allows next, the shortest first."""
        ...


class EndingSearch:
    """Looks for an ending of the text at which `probe` stands; that stands there again when it is done."""

    def __init__(self, probe: Probe, max_steps: int = MAX_STEPS) -> None:
        self._probe = probe
        self._steps_left = max_steps

    def find(self) -> list[int] | None:
        """Tokens that end the text; None if none are found."""
        if self._probe.accepting:
            return []
        found = self._straight_on()
        return self._with_returns(0) if found is None else found

    def _straight_on(self) -> list[int] | None:
        """The base's ending, with another item in place of each that would repeat one."""
        probe, found = self._probe, list[int]()
        rest = probe.plain_ending()
        while rest is None and len(found) < MAX_TOKENS and self._steps_left > 0:
            ending = probe.base_ending()
            num_kept = self._step(ending)
            other = next(filter(self._stepped, probe.other_items()), None) if num_kept else None
            if other is None:
                probe.rollback(num_kept)
                rest = self._after_fresh_bytes()
                other = self._as_another_item(ending[:num_kept]) if rest is None else None
                if other is None:
                    break
                num_kept = 0
            found += ending[:num_kept] + other
            rest = [] if probe.accepting else probe.plain_ending()
        probe.rollback(len(found))
        return None if rest is None else found + rest

    def _after_fresh_bytes(self) -> list[int] | None:
        """The base's ending after a few bytes that make the item at hand another one; the shortest of those tried."""
        probe = self._probe
        best: list[int] | None = None
        for ids in probe.fresh():
            if best is not None and len(ids) >= len(best) or not self._stepped(ids):
                continue
            rest = [] if probe.accepting else probe.plain_ending()
            if rest is not None:
                best = min(ids + rest, best or ids + rest, key=len)
            probe.rollback(len(ids))
        return best

    def _as_another_item(self, begun: list[int]) -> list[int] | None:
        """Tokens as `begun` up to a few bytes that make the item at hand another one, with which it ends."""
        probe = self._probe
        self._step(begun)
        before = probe.num_items()
        for position in range(len(begun), -1, -1):
            for ids in chain(probe.fresh(), ([token_id] for token_id in probe.allowed()[:_MAX_TRIED])):
                if self._steps_left <= 0:
                    break
                if not self._stepped(ids):
                    continue
                num_kept = self._step(probe.base_ending())
                ends = _is_further(probe.num_items(), before)
                probe.rollback(num_kept)
                if ends:
                    return begun[:position] + ids
                probe.rollback(len(ids))
            probe.rollback(1 if position else 0)
        return None

    def _with_returns(self, depth: int) -> list[int] | None:
        """The base's ending; where it repeats an item, another way from the last place before that has one."""
        probe = self._probe
        found = [] if probe.accepting else probe.plain_ending()
        if found is not None:
            return found
        ending = probe.base_ending()
        for position in range(self._step(ending), -1, -1):
            if depth < _MAX_DEPTH:
                found = self._another_way(ending[position] if position < len(ending) else None, depth)
            if found is not None:
                probe.rollback(position)
                return ending[:position] + found
            probe.rollback(1 if position else 0)
        return None

    def _another_way(self, usual: int | None, depth: int) -> list[int] | None:
        """An ending from here that does not begin with the token `usual`."""
        for ids in self._ways(usual):
            if self._steps_left <= 0:
                return None
            if self._stepped(ids):
                found = self._with_returns(depth + 1)
                self._probe.rollback(len(ids))
                if found is not None:
                    return ids + found
        return None

    def _ways(self, usual: int | None) -> Iterator[list[int]]:
        """How to go on: as another item, or with another token, the nearest to an end for the base first."""
        probe, near = self._probe, list[tuple[int, int]]()
        yield from probe.other_items()
        for token_id in [token_id for token_id in probe.allowed() if token_id != usual][:_MAX_TRIED]:
            if self._stepped([token_id]):
                near.append((probe.base_distance(), token_id))
                probe.rollback(1)
        yield from ([token_id] for _, token_id in sorted(near))

    def _stepped(self, ids: list[int]) -> bool:
        """Step by all of `ids`, or not at all."""
        num_kept = self._step(ids)
        if num_kept < len(ids):
            self._probe.rollback(num_kept)
        return num_kept == len(ids)

    def _step(self, ids: Sequence[int]) -> int:
        self._steps_left -= 1 + len(ids)
        return self._probe.step(ids)


def _is_further(after: list[int], before: list[int]) -> bool:
    """Whether one more item has ended, or what it is in."""
    changed = next((new > old for new, old in zip(after, before, strict=False) if new != old), None)
    return len(after) < len(before) if changed is None else changed
