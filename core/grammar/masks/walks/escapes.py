"""Escapes that a repeat reads as one of its characters: a backslash and one more byte, in JSON strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.masks.trie.slices import BACKSLASH

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.dfa import Dfa
    from graftlm.core.grammar.automata.stack.dpda import Dpda


class Escapes(NamedTuple):
    """What a backslash and one more byte are in a repeat.

    characters  a flag per ASCII byte behind a backslash that is one of the repeat's characters
    others      a flag per ASCII byte that may follow a backslash as well
    """

    characters: bytes
    others: bytes

    @classmethod
    def of(cls, automaton: Dfa | Dpda, states: Iterable[int], character: int, num_more: int = 0) -> Escapes | None:
        """None where no escape is a character.

        states     those in which the repeat may be; one that does not read `character` may not read a backslash either
        character  a byte of the repeat
        num_more   how many states follow the first of `states`, each behind `character`
        """
        table, classes, _ = automaton.moves
        characters, others = np.ones(128, np.uint8), np.zeros(128, np.uint8)
        same = _read_escapes(
            table, classes, automaton.returns, np.array([*states], np.int32), num_more, character, characters, others
        )
        return cls(characters.tobytes(), others.tobytes()) if same and characters.any() else None


@loop("b1(i4[:,::1], u1[::1], b1[::1], i4[::1], i8, i8, u1[::1], u1[::1])", quick=True)
def _read_escapes(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    returns: npt.NDArray[np.bool_],
    states: Int32Array,
    num_more: int,
    character: int,
    characters: npt.NDArray[np.uint8],
    others: npt.NDArray[np.uint8],
) -> bool:
    """Clear `characters` of the bytes that are none in each state, and set `others`. -> whether escapes are known"""
    for state in states:
        if not _read_at(table, classes, returns, state, character, characters, others):
            return False
    state = states[0]
    for _ in range(num_more):
        state = table[state, classes[character]]
        if state <= 0:
            break
        if not _read_at(table, classes, returns, state, character, characters, others):
            return False
    return True


@inner
def _read_at(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    returns: npt.NDArray[np.bool_],
    state: int,
    character: int,
    characters: npt.NDArray[np.uint8],
    others: npt.NDArray[np.uint8],
) -> bool:
    effect, begun = table[state, classes[character]], table[state, classes[BACKSLASH]]
    if effect == 0:
        return bool(begun == 0)
    if begun <= 0 or returns[begun]:
        return False
    for byte in range(256):
        target = table[begun, classes[byte]]
        if target == 0 and byte < 128:
            characters[byte] = 0
        elif target != effect and byte < 128:
            characters[byte], others[byte] = 0, 1
        elif target != 0 and byte >= 128:
            return False
    return True
