"""Stop strings, found in text that arrives piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

KEPT_CHARS = 1 << 12
"""Automata of stop strings up to this many characters are cached for later requests: 64 of them take 32 MB at most."""

_SHIFT = 21  # bits of a code point


class StopPush(NamedTuple):
    """Text that is safe to show now, and the stop string that ended it, if one did."""

    text: str
    matched: str | None


class StopAutomaton:
    """The Aho-Corasick automaton of stop strings: each character is one transition, whatever the number of strings.

    A state stands for the longest suffix of the text that begins a stop string; state 0 for none. Building takes a
    microsecond per character. Sequences share it: it has no state of its own.

    depths   length of the suffix, by state
    matches  the longest stop string that ends in a state, or None
    firsts   the first characters of the stop strings
    """

    def __init__(self, stop: Iterable[str]) -> None:
        self.depths = [0]
        self.matches: list[str | None] = [None]
        self._next: dict[int, int] = {}  # by state and code point
        self._links = [0]  # the state of the next shorter suffix
        stop = tuple(dict.fromkeys(stop))
        self.firsts = frozenset(text[0] for text in stop)
        children: list[list[tuple[int, int]]] = [[]]
        for text in stop:
            state = 0
            for character in text:
                key = state << _SHIFT | ord(character)
                following = self._next.get(key)
                if following is None:
                    following = self._next[key] = len(self.depths)
                    children[state].append((ord(character), following))
                    children.append([])
                    self.depths.append(self.depths[state] + 1)
                    self.matches.append(None)
                    self._links.append(0)
                state = following
            self.matches[state] = text
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for code, child in children[state]:
                link = self.step(self._links[state], code) if state else 0
                self._links[child] = link
                if self.matches[child] is None:
                    self.matches[child] = self.matches[link]
                waiting.append(child)

    def step(self, state: int, code: int) -> int:
        """Return the state after one more character, given as its code point."""
        while True:
            following = self._next.get(state << _SHIFT | code)
            if following is not None:
                return following
            if not state:
                return 0
            state = self._links[state]


_cached = lru_cache(maxsize=64)(StopAutomaton)


class StopMatcher:
    """Find the stop string that is complete first, however the text is cut into pieces.

    Text that may be the beginning of a stop string is held back until the next push decides. Of stop strings
    that end at the same character the longest wins. After a match everything further is dropped.

    stop  the stop strings, or the automaton of another matcher
    """

    def __init__(self, stop: Iterable[str] | StopAutomaton) -> None:
        if not isinstance(stop, StopAutomaton):
            stop = tuple(stop)
            stop = _cached(stop) if sum(map(len, stop)) <= KEPT_CHARS else StopAutomaton(stop)
        self.automaton = stop
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def push(self, new_text: str) -> StopPush:
        """Take the next piece of text."""
        if self._matched is not None:
            return StopPush("", self._matched)
        automaton, state = self.automaton, self._state
        if not state and automaton.firsts.isdisjoint(new_text):
            return StopPush(new_text, None)
        step, matches = automaton.step, automaton.matches
        for index, character in enumerate(new_text):
            state = step(state, ord(character))
            matched = matches[state]
            if matched is not None:
                text = self._held + new_text[: index + 1]
                self._held, self._matched = "", matched
                return StopPush(text[: len(text) - len(matched)], matched)
        self._state = state
        text, keep = self._held + new_text, automaton.depths[state]
        self._held = text[len(text) - keep :]
        return StopPush(text[: len(text) - keep], None)

    def flush(self) -> str:
        """Return what is still held back: the text ended before it could become a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
