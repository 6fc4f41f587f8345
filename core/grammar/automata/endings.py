"""The shortest path to an accepting state, for answers that must be complete within their token budget."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa, Place

MAX_PLACES = 100_000


class EndingTooLongError(GrammarError):
    """The shortest ending was not found within MAX_PLACES places."""


def shortest_ending(dfa: Dfa, place: Place) -> bytes:
    """The fewest bytes that lead from `place` to an accepting state.

    Without counters, `dfa.distance` is exact and is followed down. With them it is a lower bound (a minimum may ask
    for more rounds), which guides a best-first search. Raises EndingTooLongError where that takes too many places.
    """
    if not dfa.loops:
        return _descend(dfa, place)
    order = itertools.count()
    queue = [(int(dfa.distance[place[0]]), next(order), 0, place)]
    came_from: dict[Place, tuple[Place, int] | None] = {place: None}
    while queue:
        _, _, length, here = heapq.heappop(queue)
        if dfa.accepting[here[0]]:
            data = bytearray()
            link = came_from[here]
            while link is not None:
                data.append(link[1])
                link = came_from[link[0]]
            return bytes(reversed(data))
        for byte in reversed(dfa.ways_on(here[0])):
            after = dfa.step(here, byte)
            if after is not None and after not in came_from:
                came_from[after] = (here, byte)
                # the last entry goes first among equals: one run is followed, rather than all, on the lowest bytes
                entry = (length + 1 + int(dfa.distance[after[0]]), -next(order), length + 1, after)
                heapq.heappush(queue, entry)
        if len(came_from) > MAX_PLACES:
            raise EndingTooLongError(f"the shortest text takes more than {MAX_PLACES:,} places; lower its minimums")
    raise AssertionError("every state reaches an accepting one")


def _descend(dfa: Dfa, place: Place) -> bytes:
    data = bytearray()
    state = place[0]
    while not dfa.accepting[state]:
        targets = dfa.table[state]
        c = int(np.argmin(np.where(targets > 0, dfa.distance[targets], np.iinfo(np.int32).max)))
        data.append(dfa.first_bytes[c])
        state = int(targets[c])
    return bytes(data)
