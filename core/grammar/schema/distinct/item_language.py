"""The language of an item of an array whose items must differ: whether one is left that is not there yet."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cached_property
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import START, Dfa
from graftlm.core.grammar.automata.products.product import without_products

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.ast import Node

_ITEM_STATES = 2_000
_FRACTION = re.compile(rb"(-?\d+(?:\.\d+)?)\.?")
_MAX_DIGITS = 17
_STEPS_PER_ENDING = 16
_SPELLINGS = 4
_NUMBERS = tuple(bytes([byte]) for byte in b"-0123456789")
_ZERO = re.compile(rb"-?0(\.0*)?[eE].*")


class ItemLanguage:
    """The texts of an item, and how many there are from each state of their automaton.

    counts    float64 [num_states]: infinite where there is no end of them
    is_whole  False where an item may also be an array or object, which is not in the automaton
    """

    def __init__(self, dfa: Dfa, is_whole: bool) -> None:
        self._dfa = dfa
        self._is_whole = is_whole
        digits = np.unique(dfa.classes[ord("1") : ord("9") + 1])
        changing = dfa.table[:, digits].any(axis=1)
        self._endings: dict[tuple[int, int], tuple[bytes, ...]] = {}
        self._may_change = _leading_to(dfa, changing)
        self.counts = _count_words(dfa, _without_zeros(dfa, self._may_change))
        self._may_run_out = _leading_to(dfa, ~dfa.accepting & np.isfinite(self.counts))

    @classmethod
    def of(cls, node: Node, is_whole: bool) -> ItemLanguage | None:
        from graftlm.core.grammar.spec import Limits

        try:
            return cls(
                Dfa.compile(without_products(node), Limits(states=_ITEM_STATES, seconds=1.0), counters=False), is_whole
            )
        except GrammarError:
            return None  # so large that items hardly run out

    @property
    def num_texts(self) -> float:
        return float(self.counts[self._dfa.start])

    def has_more(self, begun: bytes, seen: tuple[tuple[bytes, str], ...]) -> bool:
        place = self._dfa.walk(self._dfa.start, begun)
        if place is None or not (begun or self._is_whole):
            return True  # the item is an array or object, or can be
        if _ZERO.fullmatch(begun) and any(value == "0" for _, value in seen):
            return False  # whatever the exponent
        fraction = _FRACTION.fullmatch(begun)
        if fraction and (b"." in begun or len(fraction[0]) > _MAX_DIGITS):
            value = as_read(fraction[1].decode())  # what may follow are zeros, or more than float64 holds
            is_new = all(value != other for _, other in seen)
            if len(fraction[0]) > _MAX_DIGITS or not self._may_change[place[0]]:
                return is_new
            if is_new and any(self._dfa.matches(begun + zeros) for zeros in (b"", b"0")):
                return True
        if np.isinf(self.counts[place[0]]):
            return True
        if begun[:1] in _NUMBERS and b"e" in begun.lower():
            return self._has_another_number(begun, {value for _, value in seen})
        written = ((value.encode() if text[:1] in _NUMBERS else text, text) for text, value in seen)
        mine = (short for short, text in written if self._dfa.matches(text) or self._dfa.matches(short))
        return bool(self.counts[place[0]] > sum(short.startswith(begun) for short in mine))

    def _has_another_number(self, begun: bytes, values: set[str]) -> bool:
        """Whether one that begins so, of which there are some, is none of `values`: exponents spell numbers anew."""
        number = _SPELLINGS * (len(values) + 1)
        found = [as_read((begun + ending).decode()) for ending in self.endings(begun, number)]
        return len(found) >= number or any(value not in values for value in found)

    def endings(self, begun: bytes, number: int) -> Iterator[bytes]:
        """About so many of the shortest ways to end a text that begins so, the shortest first."""
        place = self._dfa.walk(self._dfa.start, begun)
        if place is not None and (place[0], number) not in self._endings:
            self._endings[place[0], number] = tuple(self._shortest(place[0], number))
        return iter(() if place is None else self._endings[place[0], number])

    def _shortest(self, state: int, number: int) -> Iterator[bytes]:
        work = [(float(self._distances[state]), b"", state)]
        num_steps = _STEPS_PER_ENDING * number
        while work and number and num_steps:
            _, text, state = heappop(work)
            num_steps -= 1
            if self._dfa.accepting[state]:
                number -= 1
                yield text
            num_used: dict[int, int] = {}
            for byte, target in enumerate(self._dfa.table[state, self._dfa.classes].tolist()):
                num_used[target] = num_used.get(target, 0) + 1
                if np.isfinite(self._distances[target]) and num_used[target] <= number:
                    heappush(work, (len(text) + 1 + float(self._distances[target]), text + bytes([byte]), target))

    @cached_property
    def _distances(self) -> npt.NDArray[np.float64]:
        """How many bytes are left at least from each state: float64 [num_states], infinite where no text ends."""
        found = np.where(self._dfa.accepting, 0.0, np.inf)
        found[0] = np.inf
        while True:
            nearer = np.minimum(found, found[self._dfa.table].min(axis=1) + 1)
            nearer[0] = np.inf
            if (nearer == found).all():
                return found
            found = nearer

    def may_begin(self, begun: bytes) -> bool:
        return self._is_elsewhere(begun) or self._dfa.walk(self._dfa.start, begun) is not None

    def has(self, text: bytes) -> bool:
        return self._is_elsewhere(text) or self._dfa.matches(text)

    def _is_elsewhere(self, text: bytes) -> bool:
        """Whether it begins an array or object, which are not in the automaton."""
        return not self._is_whole and text[:1] in (b"[", b"{")

    def may_run_out(self, begun: bytes) -> bool:
        place = self._dfa.walk(self._dfa.start, begun)
        return place is not None and bool(self._may_run_out[place[0]])


def _leading_to(dfa: Dfa, states: Any) -> npt.NDArray[np.bool_]:
    """The live states from which one of `states` can be reached, these included."""
    found: npt.NDArray[np.bool_] = states.copy()
    found[0] = False
    while True:
        more = found | found[dfa.table].any(axis=1)
        more[0] = False
        if (more == found).all():
            return found
        found = more


def _without_zeros(dfa: Dfa, may_change: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The table without the zeros at the end of a fraction, which make no other number: 2.0 is 2."""
    table = dfa.table.copy()
    point, zero = dfa.classes[ord(".")], dfa.classes[ord("0")]
    numbers = _reached(dfa, dfa.table[START, dfa.classes[list(b"".join(_NUMBERS))]])
    fractions = _reached(dfa, dfa.table[numbers, point])
    ended = numbers[dfa.accepting[numbers]]
    for states, next_class in ((ended, point), (fractions, zero)):
        table[states[~may_change[table[states, next_class]]], next_class] = 0
    return table


def _reached(dfa: Dfa, states: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The live states that can be reached from some, these included."""
    found = np.zeros(dfa.num_states, bool)
    found[states] = True
    while True:
        more = found.copy()
        more[dfa.table[found]] = True
        if (more == found).all():
            found[0] = False
            return np.flatnonzero(found)
        found = more


def _count_words(dfa: Dfa, table: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    sizes = np.bincount(dfa.classes, minlength=table.shape[1])
    known = np.zeros(dfa.num_states, bool)
    known[0] = True
    counts = np.zeros(dfa.num_states)
    while True:
        ready = known[table].all(axis=1) & ~known
        if not ready.any():
            counts[~known] = np.inf
            return counts
        counts[ready] = dfa.accepting[ready] + (counts[table[ready]] * sizes).sum(axis=1)
        known |= ready


def as_read(text: str) -> str:
    """Equal for numbers that are equal once they are read: those with a fraction or exponent become float64."""
    if text.removeprefix("-").isdigit():
        return "0" if text == "-0" else text
    value = float(text)
    if math.isinf(value) or (value == 0 and any(digit in "123456789" for digit in text.lower().partition("e")[0])):
        return text  # beyond float64: readers differ
    return str(int(value)) if value.is_integer() else repr(value)
