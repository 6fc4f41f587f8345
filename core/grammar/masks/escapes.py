"""Escapes that a repeat reads as one of its characters: a backslash and one more byte, in JSON strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, inner
from graftlm.core.grammar.masks.slices import BACKSLASH

if TYPE_CHECKING:
    import numpy.typing as npt


@inner
def read_escapes(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    returns: npt.NDArray[np.bool_],
    states: Int32Array,
    num_more: int,
    character: int,
    characters: npt.NDArray[np.uint8],
    others: npt.NDArray[np.uint8],
) -> bool:
    """Read what a backslash and one more byte are in a repeat.

    states      those in which the repeat may be; one that does not read `character` may not read a backslash either
    num_more    how many states follow the first of `states`, each behind `character`
    character   a byte of the repeat
    characters  flags per ASCII byte, all set: cleared unless it is one of the repeat's characters behind a backslash
    others      flags per ASCII byte, none set: set where it may follow a backslash as well
    -> whether escapes are known
    """
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
