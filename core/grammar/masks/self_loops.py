"""States that repeat a class of characters: by a loop, by a counted one, or by a state for each of the repeats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.jit import Int32Array, inner, loop
from graftlm.core.grammar.masks.escapes import read_escapes
from graftlm.core.grammar.masks.slices import CharClass

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.stack.dpda import Dpda

_CHARACTERS = (
    (0xC2, 0xDF, 0x80, 0xBF, 0),
    (0xE0, 0xE0, 0xA0, 0xBF, 1),
    (0xE1, 0xEC, 0x80, 0xBF, 1),
    (0xED, 0xED, 0x80, 0x9F, 1),
    (0xEE, 0xEF, 0x80, 0xBF, 1),
    (0xF0, 0xF0, 0x90, 0xBF, 2),
    (0xF1, 0xF3, 0x80, 0xBF, 2),
    (0xF4, 0xF4, 0x80, 0x8F, 2),
)
"""Characters beyond ASCII: lead bytes first to last, the range of the second byte, and how many bytes follow that."""


@dataclass(frozen=True)
class SelfLoop:
    """A state's self-loop: a character of `chars` leads back to the state, or counts in `register` up to `maximum`.

    room   how many characters can follow where each leads to a state of its own; None where the state stays
    exits  a flag per ASCII byte: what else may follow the characters, beside a part of a character, and where escapes
           are characters one per byte of the other escapes; None is anything
    """

    chars: CharClass
    register: int | None = None
    maximum: int = -1
    room: int | None = None
    exits: bytes | None = None


def self_loop(automaton: Dfa | Dpda, state: int, longest: int = 0) -> SelfLoop | None:
    """The class of characters that `state` repeats, if it is large.

    longest  characters of the longest token: a repeat that is written out is followed so far
    """
    flags, numbers = np.zeros((5, 128), np.uint8), np.empty(7, np.int64)
    table, classes, actions = automaton.moves
    found = _find(table, classes, actions, automaton.returns, automaton.degrees, state, longest, flags, numbers)
    return _loop_of(flags.tobytes(), numbers.tobytes()) if found else None


@lru_cache(maxsize=1024)
def _loop_of(flags: bytes, numbers: bytes) -> SelfLoop:
    """What `_find` found: schemas have the same few, and collections look at each that is kept."""
    first, rest, exits, escaped, others = (flags[at : at + 128] for at in range(0, len(flags), 128))
    wide_first, wide_rest, register, maximum, room, leaves, escapes = np.frombuffer(numbers, np.int64).tolist()
    chars = CharClass(first, rest, bool(wide_first), bool(wide_rest), escaped if escapes else b"")
    known = None if not leaves else exits + others if escapes else exits
    return SelfLoop(chars, None if register < 0 else register, maximum, None if room < 0 else room, known)


@loop("b1(i4[:,::1], u1[::1], i4[:,::1], b1[::1], i2[::1], i8, i8, u1[:,::1], i8[::1])", quick=True)
def _find(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    returns: npt.NDArray[np.bool_],
    degrees: npt.NDArray[np.int16],
    state: int,
    longest: int,
    flags: npt.NDArray[np.uint8],
    numbers: npt.NDArray[np.int64],
) -> bool:
    """Fill `flags`, which are 0, and `numbers` with what a SelfLoop has. -> whether `state` has one

    flags    uint8 [5, 128], per ASCII byte: first, rest, exits, escapes that are characters, other escapes
    numbers  int64 [7]: wide first, wide rest, register or -1, maximum, room or -1, whether exits are known, and
             whether escapes are characters
    """
    first, rest, exits, escaped, others = flags[0], flags[1], flags[2], flags[3], flags[4]
    states, num_states = np.zeros(4, np.int32), 1
    states[0] = state
    room, num_more = -1, 0
    found, wide_first, wide_rest, register, maximum = _repeat(table, classes, actions, state, first, rest)
    leaves = found and wide_first == wide_rest and np.array_equal(first, rest)
    if leaves:
        effect = table[state, classes[_least(rest)]]
        for k in range(3 if effect < 0 else 1):
            target = actions[-effect, 3 + k] if effect < 0 else effect
            if target != 0 and target != state:
                states[num_states] = target
                num_states += 1
        for i in range(num_states):
            leaves = leaves and _leaves(table, classes, returns, degrees, states[i], wide_first, rest, exits)
    if not found:
        num_more, wide = (
            _room(table, classes, returns, degrees, state, longest, first, exits) if longest > 0 else (0, 0)
        )
        if num_more == 0:
            return False
        rest[:] = first
        wide_first = wide_rest = wide != 0
        room = num_more if num_more < longest else -1
        leaves = True
    escapes = False
    if leaves:
        escaped[:] = 1
        read = read_escapes(table, classes, returns, states[:num_states], num_more, _least(rest), escaped, others)
        escapes = read and _least(escaped) < 128
    else:
        exits[:] = 0
    if not escapes:
        escaped[:] = 0
        others[:] = 0
    numbers[0], numbers[1], numbers[2], numbers[3] = wide_first, wide_rest, register, maximum
    numbers[4], numbers[5], numbers[6] = room, leaves, escapes
    return True


@inner
def _least(flags: npt.NDArray[np.uint8]) -> int:
    """The first byte that is flagged, 128 for none."""
    for byte in range(128):
        if flags[byte]:
            return byte
    return 128


@inner
def _repeat(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    actions: Int32Array,
    state: int,
    first: npt.NDArray[np.uint8],
    rest: npt.NDArray[np.uint8],
) -> tuple[bool, bool, bool, int, int]:
    """Fill `first` and `rest` with flags per ASCII byte. Where there are no actions, what is negative leads elsewhere.

    -> found, wide first, wide rest, register or -1, maximum
    """
    nothing = (False, False, False, -1, -1)
    # what most bytes do: a majority vote
    effect, votes = 0, 0
    for byte in range(128):
        value = table[state, classes[byte]]
        if value > 0 or value < 0 and len(actions) > 1:
            if votes == 0:
                effect = value
            votes += 1 if value == effect else -1
    register, maximum = -1, -1
    if effect == 0:
        return nothing
    low, top = 0, 0
    mid = effect
    if effect < 0:
        register, maximum = actions[-effect, 0], actions[-effect, 2]
        low, mid, top = actions[-effect, 3], actions[-effect, 4], actions[-effect, 5]
        if register < 0 and low + top != 0:
            return nothing
    num_rest = 0
    for byte in range(128):
        c = classes[byte]
        first[byte] = table[state, c] == effect and effect != 0
        rest[byte] = 0
        again = effect if register >= 0 else mid  # what keeps a character inside
        if mid > 0 and table[mid, c] != again or low > 0 and table[low, c] != again:
            continue
        if top > 0 and table[top, c] != 0:
            return nothing  # what follows could take over where the count ends
        rest[byte] = 1
        num_rest += 1
    if num_rest < 16:
        return nothing
    wide_first = _wide(table, classes, state, effect)
    again = effect if register >= 0 else mid
    wide_rest = (mid == 0 or _wide(table, classes, mid, again)) and (low == 0 or _wide(table, classes, low, again))
    if top > 0:
        for byte in range(0xC2, 0xF5):
            if table[top, classes[byte]] != 0:
                wide_rest = False
    return True, wide_first, wide_rest, register, maximum


@inner
def _same(table: Int32Array, classes: npt.NDArray[np.uint8], state: int, low: int, high: int) -> int:
    """What all bytes from `low` to `high` do in `state`, or 0 where they differ."""
    value = table[state, classes[low]]
    for byte in range(low + 1, high + 1):
        if table[state, classes[byte]] != value:
            return 0
    return int(value)


@inner
def _wide(table: Int32Array, classes: npt.NDArray[np.uint8], state: int, effect: int) -> bool:
    """Whether every character beyond ASCII has the same effect in `state`."""
    for lead, last, low, high, more in _CHARACTERS:
        value = _same(table, classes, state, lead, last)
        if value > 0:
            value = _same(table, classes, value, low, high)
        for _ in range(more):
            if value > 0:
                value = _same(table, classes, value, 0x80, 0xBF)
            else:
                return False
        if value != effect or value == 0:
            return False
    return True


@inner
def _leaves(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    returns: npt.NDArray[np.bool_],
    degrees: npt.NDArray[np.int16],
    state: int,
    wide: bool,
    rest: npt.NDArray[np.uint8],
    exits: npt.NDArray[np.uint8],
) -> bool:
    """Set `exits` of the ASCII bytes outside of `rest` that `state` reads.

    wide  whether the characters beyond ASCII are inside
    -> False where it reads bytes beyond ASCII that are no characters, or any where they are not inside, or may return
    to the state below
    """
    if returns[state]:
        return False
    for byte in range(0x80, 0x100):
        if not wide and table[state, classes[byte]] != 0:
            return False
    for byte in range(128):
        if rest[byte] == 0 and table[state, classes[byte]] != 0:
            exits[byte] = 1
    if not wide:
        return True
    for byte in range(0x80, 0x100):
        if (byte < 0xC2 or byte > 0xF4) and table[state, classes[byte]] != 0:
            return False
    for lead, last, low, high, more in _CHARACTERS:
        value = table[state, classes[lead]]
        for byte in range(lead + 1, last + 1):
            if table[state, classes[byte]] != value:
                return False
        for _ in range(more + 1):
            if value == 0:
                break
            # it reads the bytes from `low` to `high` and no others
            after = _same(table, classes, value, low, high) if value > 0 and not returns[value] else 0
            if after == 0 or degrees[value] != high - low + 1:
                return False
            value, low, high = after, 0x80, 0xBF
    return True


@inner
def _room(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    returns: npt.NDArray[np.bool_],
    degrees: npt.NDArray[np.int16],
    state: int,
    longest: int,
    chars: npt.NDArray[np.uint8],
    exits: npt.NDArray[np.uint8],
) -> tuple[int, int]:
    """A repeat up to some number, each character of which leads to a state of its own: fill `chars` with a flag per
    ASCII byte that `state` repeats, and `exits` with what else may follow.

    -> how often, at most `longest`, 0 for no repeat; and 1 where all characters beyond ASCII are repeated as well, 0
    where none is
    """
    after, wide = _step(table, classes, returns, degrees, state, chars, exits)
    here = np.empty(128, np.uint8)
    room = 0
    while after != 0 and room < longest:
        room += 1
        if after == state:
            room = longest
            break
        state = after
        after, wide_here = _step(table, classes, returns, degrees, state, here, exits)
        for byte in range(128):
            if here[byte] != chars[byte] or wide_here != wide:
                after = 0
    if room == longest or room == 0:
        return room, wide
    # the last state, whose exits are those of `_step` if it was one, reads none of the characters
    for byte in range(256):
        if table[state, classes[byte]] != 0:
            if byte >= 128 or chars[byte]:
                return 0, 0
            exits[byte] = 1
    return (0, 0) if returns[state] else (room, wide)


@inner
def _step(
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    returns: npt.NDArray[np.bool_],
    degrees: npt.NDArray[np.int16],
    state: int,
    chars: npt.NDArray[np.uint8],
    exits: npt.NDArray[np.uint8],
) -> tuple[int, int]:
    """Fill `chars` with flags and add to `exits`.

    -> the state that most characters lead to, 0 where not all others leave; and 1 where all characters beyond ASCII
    lead there, 0 where none is read
    """
    after, votes = 0, 0
    for byte in range(128):
        value = table[state, classes[byte]]
        if value != 0:
            if votes == 0:
                after = value
            votes += 1 if value == after else -1
    if after <= 0:
        return 0, 0
    wide = _wide(table, classes, state, after)
    num_chars = 0
    for byte in range(128):
        chars[byte] = table[state, classes[byte]] == after
        num_chars += chars[byte]
    if num_chars < 16 or not _leaves(table, classes, returns, degrees, state, wide, chars, exits):
        return 0, 0
    return int(after), int(wide)
