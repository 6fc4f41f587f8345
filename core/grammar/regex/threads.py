"""Regexes with lookbehinds, or with lookaheads in repeats, as an automaton over threads.

A thread is what has to match from here on, all of it, and what must not: at a lookahead its body joins the one or the
other. What a lookbehind asks about is followed from the beginning of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.ast import (
    ANY_CHAR,
    MAX_CODE_POINT,
    Alternation,
    CharSet,
    Concat,
    Empty,
    Graph,
    Literal,
    Node,
    Range,
    Repeat,
    Rule,
    char_set,
    star,
)
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.regex.anchors import split
from graftlm.core.grammar.regex.lookarounds import Lookahead, Lookaround

MAX_STATES = 20_000
_MATCHED, _AT_END, _END, _WIDE_END = range(4)
_BYTES_OF_WAY, _BYTES_OF_STATE = 700, 60  # three sets, and what each state in them takes, about
_NONE: frozenset[int] = frozenset()

_Behind: TypeAlias = tuple[frozenset[int] | None, ...]
"""For each lookbehind where its body may be by now; None where none of what is left asks about it."""


_Body: TypeAlias = tuple[type[Lookaround], Node, bool]


def _body(look: Lookaround) -> _Body:
    """What two lookarounds share that look the same way for the same."""
    return type(look), look.body, look.wide


class _Thread(NamedTuple):
    """States of the program that have to match the rest of the text, and those that must not match how it begins."""

    owed: frozenset[int]
    banned: frozenset[int] = _NONE
    behind: _Behind = ()
    at_start: bool = False


def language(node: Node, *, search: bool, wide: bool) -> Node:
    """The texts that `node`, a pattern as it was parsed, matches as a whole or, with `search`, contain a match of it.

    wide  as in dialects where `$` also matches before a line break that ends the text.
    Raises GrammarError with a position for a lookaround inside one that is refused or looks behind.
    """
    program = _Program(wide)
    start = program.enter(node, _MATCHED if search else _AT_END)
    if search:
        start = program.enter(star(ANY_CHAR), start)
    return _Threads(program).graph(start)


class _Program:
    """States that each take one character (`moves`) or none (`jumps`, where the assertion, if any, holds)."""

    def __init__(self, wide: bool) -> None:
        self.moves: dict[int, tuple[tuple[Range, ...], int]] = {}
        self.jumps: list[list[tuple[Rule | None, int]]] = [[], [], [], []]
        self.lookbehinds: list[int] = []  # where the body of each begins
        self.entries: dict[_Body, int] = {}  # where the body of a lookahead begins; of a lookbehind, its number
        self.end = _WIDE_END if wide else _END
        line_break = self._state()
        self.moves[line_break] = (((10, 10),), _AT_END)
        self.jumps[_END] = [(None, _AT_END)]
        self.jumps[_WIDE_END] = [(None, _AT_END), (None, line_break)]

    def enter(self, node: Node, target: int) -> int:
        """The state from which `node` leads to `target`."""
        match node:
            case Empty():
                return target
            case Literal(data):
                for char in reversed(data.decode()):
                    target = self._move(((ord(char), ord(char)),), target)
                return target
            case CharSet(ranges):
                return self._move(ranges, target)
            case Concat(items):
                for item in reversed(items):
                    target = self.enter(item, target)
                return target
            case Alternation(items):
                return self._state(*((None, self.enter(item, target)) for item in items))
            case Repeat(item, least, most):
                place = target
                if most is None:
                    place = self._state((None, target))
                    self.jumps[place].append((None, self.enter(item, place)))
                for _ in range((most or least) - least):
                    place = self._state((None, target), (None, self.enter(item, place)))
                for _ in range(least):
                    place = self.enter(item, place)
                return place
            case Rule():
                if isinstance(node, Lookaround) and _body(node) not in self.entries:
                    self._add_body(node)
                return self._state((node, target))
        raise AssertionError(node)

    def _add_body(self, look: Lookaround) -> None:
        is_ahead = isinstance(look, Lookahead)
        ways = []
        for asks_for_start, body, ends in split(look.body):
            if ends and not is_ahead:
                raise GrammarError(
                    f"regex, position {look.position}: '$' in a lookbehind; leave it out", position=look.position
                )
            way = self.enter(body, (_WIDE_END if look.wide else _END) if ends else _MATCHED)
            ways.append((None, self._state((Rule("^"), way)) if asks_for_start else way))
        entry = self._state(*ways)
        if is_ahead:
            self.entries[_body(look)] = entry
        else:
            self.entries[_body(look)] = len(self.lookbehinds)
            self.lookbehinds.append(entry)

    def _move(self, ranges: tuple[Range, ...], target: int) -> int:
        state = self._state()
        self.moves[state] = (ranges, target)
        return state

    def _state(self, *jumps: tuple[Rule | None, int]) -> int:
        if len(self.jumps) > MAX_STATES:
            raise GrammarError(f"the regex needs more than {MAX_STATES:,} states; repeat less in it")
        self.jumps.append(list(jumps))
        return len(self.jumps) - 1

    def asked(self) -> list[frozenset[int]]:
        """For each state the lookbehinds that may be asked about from there."""
        found: list[frozenset[int]] = [_NONE] * len(self.jumps)
        changed = True
        while changed:
            check()
            changed = False
            for state in reversed(range(len(found))):
                more = found[state]
                if state in self.moves:
                    more |= found[self.moves[state][1]]
                for look, target in self.jumps[state]:
                    more |= found[target]
                    if isinstance(look, Lookaround):
                        entry = self.entries[_body(look)]
                        more |= found[entry] if isinstance(look, Lookahead) else frozenset({entry})
                changed |= more != found[state]
                found[state] = more
        return found


class _Threads:
    def __init__(self, program: _Program) -> None:
        self._program = program
        self._asked = program.asked()
        self._ranges, self._classes = _classes([ranges for ranges, _ in program.moves.values()])

    def graph(self, start: int) -> Graph:
        """The automaton of the texts that match from the state `start` on."""
        behind: _Behind = tuple(frozenset({entry}) for entry in self._program.lookbehinds)
        threads = [_Thread(frozenset({start}), behind=self._needed(behind, {start}), at_start=True)]
        numbers = {threads[0]: 0}
        rows: list[tuple[tuple[Node, int], ...]] = []
        accepting = set()
        for number, thread in enumerate(threads):  # it grows meanwhile
            check()
            if len(threads) > MAX_STATES:
                raise GrammarError(
                    f"the lookarounds of the regex need more than {MAX_STATES:,} states; "
                    "look less far, or repeat less beside them"
                )
            steps: dict[_Thread, set[int]] = {}
            behind = self._seen(thread)
            for owed, banned in self._settled(thread, behind):
                if owed <= {_AT_END} and _AT_END not in banned:
                    accepting.add(number)
                check()
                for char in range(len(self._ranges)):
                    after = self._after(owed, banned, behind, char)
                    if after is not None:
                        steps.setdefault(after, set()).add(char)
            row = []
            for after, chars in steps.items():
                if after not in numbers:
                    numbers[after] = len(threads)
                    threads.append(after)
                row.append((char_set(part for char in chars for part in self._ranges[char]), numbers[after]))
            rows.append(tuple(row))
        return Graph(tuple(rows), frozenset(accepting))

    def _after(self, owed: frozenset[int], banned: frozenset[int], behind: _Behind, char: int) -> _Thread | None:
        moved = set(self._moved(owed, char))
        if len(moved) < len(owed) and sum(self._takes(state, char) for state in owed) < len(owed):
            return None
        refused = frozenset(self._moved(banned, char))
        followed = tuple(
            None if states is None else frozenset({*self._moved(states, char), entry})
            for states, entry in zip(behind, self._program.lookbehinds, strict=True)
        )
        return _Thread(frozenset(moved), refused, self._needed(followed, moved | refused))

    def _takes(self, state: int, char: int) -> bool:
        return state in self._program.moves and char in self._classes[self._program.moves[state][0]]

    def _moved(self, states: Iterable[int], char: int) -> Iterator[int]:
        return (self._program.moves[state][1] for state in states if self._takes(state, char))

    def _needed(self, behind: _Behind, states: Iterable[int]) -> _Behind:
        asked = _NONE.union(*(self._asked[state] for state in states))
        return tuple(found if number in asked else None for number, found in enumerate(behind))

    def _seen(self, thread: _Thread) -> _Behind:
        return tuple(None if states is None else self._closed(states, thread.at_start) for states in thread.behind)

    def _closed(self, states: Iterable[int], at_start: bool) -> frozenset[int]:
        """The states that are reached from `states` without a character."""
        found = set(states)
        work = list(found)
        while work:
            for look, target in self._program.jumps[work.pop()]:
                if isinstance(look, Lookaround):
                    raise GrammarError(
                        f"regex, position {look.position}: a lookaround inside one that is refused or looks behind; "
                        "write the alternatives out",
                        position=look.position,
                    )
                if (look is None or at_start) and target not in found:
                    found.add(target)
                    work.append(target)
        return frozenset(found)

    def _settled(self, thread: _Thread, behind: _Behind) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """The ways to choose jumps until each state takes a character or the end: what is owed then, and banned."""
        work = [(thread.owed, _NONE, thread.banned)]
        known = set(work)
        found = set()
        num_bytes = 0
        while work:
            check(num_bytes)
            pending, settled, banned = work.pop()
            if not pending:
                refused = self._closed(banned, thread.at_start)
                way = settled, frozenset(state for state in refused if self._stays(state))
                if _MATCHED not in refused and way not in found:
                    found.add(way)
                    yield way
                continue
            state = next(iter(pending))
            left = pending - {state}
            if state == _MATCHED:
                ways = [(left, settled, banned)]
            elif self._stays(state):
                ways = [(left, settled | {state}, banned)]
            else:
                ways = [
                    (left | more, settled, banned | refused)
                    for look, target in self._program.jumps[state]
                    for more, refused in self._asserted(look, target, behind, thread.at_start)
                ]
            new = [way for way in ways if way not in known]
            work += new
            known.update(new)
            num_bytes += sum(_BYTES_OF_WAY + _BYTES_OF_STATE * sum(map(len, way)) for way in new)

    def _stays(self, state: int) -> bool:
        return state == _AT_END or state in self._program.moves

    def _asserted(
        self, look: Rule | None, target: int, behind: _Behind, at_start: bool
    ) -> Iterator[tuple[set[int], set[int]]]:
        """What is owed and banned from now on if a jump to `target` is taken, where it may be."""
        if look is None:
            yield {target}, set()
        elif isinstance(look, Lookahead):
            entry = self._program.entries[_body(look)]
            yield ({target}, {entry}) if look.refused else ({target, entry}, set())
        elif isinstance(look, Lookaround):
            seen = behind[self._program.entries[_body(look)]]
            if seen is not None and (_MATCHED in seen) != look.refused:
                yield {target}, set()
        elif look.name[0] == "$":
            yield {target, self._program.end}, set()
        elif at_start:
            yield {target}, set()


def _classes(sets: list[tuple[Range, ...]]) -> tuple[list[list[Range]], dict[tuple[Range, ...], frozenset[int]]]:
    """Characters that no set tells apart, as classes: the ranges of each, and the classes that each set consists of."""
    distinct = list(dict.fromkeys(sets))
    cuts = sorted({0, MAX_CODE_POINT + 1}.union(*({low, high + 1} for ranges in distinct for low, high in ranges)))
    place = {cut: i for i, cut in enumerate(cuts)}
    members: list[list[int]] = [[] for _ in cuts[1:]]
    for number, ranges in enumerate(distinct):
        for low, high in ranges:
            for i in range(place[low], place[high + 1]):
                members[i].append(number)
    classes: dict[tuple[int, ...], list[Range]] = {}
    for i, numbers in enumerate(members):
        classes.setdefault(tuple(numbers), []).append((cuts[i], cuts[i + 1] - 1))
    return list(classes.values()), {
        ranges: frozenset(i for i, numbers in enumerate(classes) if number in numbers)
        for number, ranges in enumerate(distinct)
    }
