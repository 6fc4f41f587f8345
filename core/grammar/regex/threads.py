"""Regexes with lookbehinds, or with lookaheads or anchors in repeats, as an automaton over threads.

A thread is what has to match from here on, all of it, and what must not: at a lookahead its body joins the one or the
other. What a lookbehind asks about is followed from the beginning of the text; where it looks ahead itself, a thread
for each answer goes on, which owes or bans what was looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
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
from graftlm.core.grammar.regex.lookarounds import Lookahead, Lookaround

MAX_STATES = 20_000
_MATCHED, _AT_END, _END, _WIDE_END = range(4)
_BYTES_OF_WAY, _BYTES_OF_STATE = 700, 60  # three sets, and what each state in them takes, about
_NONE: frozenset[int] = frozenset()

_Behind: TypeAlias = tuple[frozenset[int] | None, ...]
"""For each lookbehind where its body may be by now; None where none of what is left asks about it."""

_Sets: TypeAlias = tuple[frozenset[int], frozenset[int]]
_Body: TypeAlias = tuple[type[Lookaround], Node, bool]


def _body(look: Lookaround) -> _Body:
    """What two lookarounds share that look the same way for the same."""
    return type(look), look.body, look.wide


class _Assertion(NamedTuple):
    """What must hold where a jump is taken: the start of the text, or that `entry` matches what is beside the place.

    entry  where the body of a lookahead begins; of a lookbehind, its number; None for the start
    """

    entry: int | None
    is_ahead: bool = False
    refused: bool = False


class _Thread(NamedTuple):
    """States of the program that have to match the rest of the text, and those that must not match how it begins."""

    owed: frozenset[int]
    banned: frozenset[int] = _NONE
    behind: _Behind = ()
    at_start: bool = False


def language(node: Node, *, search: bool, wide: bool) -> Graph:
    """The texts that `node`, a pattern as it was parsed, matches as a whole or, with `search`, contain a match of it.

    wide  as in dialects where `$` also matches before a line break that ends the text.
    Raises GrammarError where the lookarounds need too many states.
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
        self.jumps: list[list[tuple[_Assertion | None, int]]] = [[], [], [], []]
        self.lookbehinds: list[int] = []  # where the body of each begins; those inside another come before it
        self._entries: dict[_Body, int] = {}
        self._end = _WIDE_END if wide else _END
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
                return self._state((self._assertion(node), target))
        raise AssertionError(node)

    def _assertion(self, place: Rule) -> _Assertion:
        if isinstance(place, Lookaround):
            entry = self._entry(place)
            return _Assertion(entry, isinstance(place, Lookahead), place.refused)
        return _Assertion(self._end, is_ahead=True) if place.name[0] == "$" else _Assertion(None)

    def _entry(self, look: Lookaround) -> int:
        key = _body(look)
        if key not in self._entries:
            outer, self._end = self._end, _WIDE_END if look.wide else _END
            self._entries[key] = entry = self.enter(look.body, _MATCHED)
            self._end = outer
            if not isinstance(look, Lookahead):
                self._entries[key] = len(self.lookbehinds)
                self.lookbehinds.append(entry)
        return self._entries[key]

    def _move(self, ranges: tuple[Range, ...], target: int) -> int:
        state = self._state()
        self.moves[state] = (ranges, target)
        return state

    def _state(self, *jumps: tuple[_Assertion | None, int]) -> int:
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
                for asserted, target in self.jumps[state]:
                    more |= found[target]
                    if asserted is None or asserted.entry is None:
                        continue
                    if asserted.is_ahead:
                        more |= found[asserted.entry]
                    else:  # its body may ask about others
                        more |= {asserted.entry} | found[self.lookbehinds[asserted.entry]]
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
            for behind, sure in self._seen(thread):
                for owed, banned in self._settled(sure, behind):
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

    def _seen(self, thread: _Thread) -> Iterator[tuple[_Behind, _Thread]]:
        """What lookbehinds have seen by now, for each way to answer what they look ahead for; and what that adds."""
        work: list[dict[int, bool]] = [{}]
        while work:
            check()
            answers = work.pop()
            behind = self._answered(thread, answers)
            if isinstance(behind, int):
                work += [{**answers, behind: answer} for answer in (True, False)]
                continue
            owed = thread.owed | {entry for entry, answer in answers.items() if answer}
            banned = thread.banned | {entry for entry, answer in answers.items() if not answer}
            yield behind, thread._replace(owed=owed, banned=banned)

    def _answered(self, thread: _Thread, answers: dict[int, bool]) -> _Behind | int:
        """The same for these `answers`; or the lookahead whose answer is needed beside them."""
        behind: list[frozenset[int] | None] = []
        for states in thread.behind:
            if states is None:
                behind.append(None)
                continue
            found = set(states)
            work = list(found)
            while work:
                for asserted, target in self._program.jumps[work.pop()]:
                    if target in found:
                        continue
                    if asserted is not None:
                        holds = self._holds(asserted, behind, thread.at_start)
                        if holds is None:
                            assert asserted.entry is not None
                            if asserted.entry not in answers:
                                return asserted.entry
                            holds = answers[asserted.entry] != asserted.refused
                        if not holds:
                            continue
                    found.add(target)
                    work.append(target)
            behind.append(frozenset(found))
        return tuple(behind)

    def _holds(self, asserted: _Assertion, behind: Sequence[frozenset[int] | None], at_start: bool) -> bool | None:
        """Whether an assertion holds at a place; None where what follows decides."""
        if asserted.entry is None:
            return at_start
        if asserted.is_ahead:
            return None
        seen = behind[asserted.entry]
        return seen is not None and (_MATCHED in seen) != asserted.refused

    def _settled(self, thread: _Thread, behind: _Behind) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """The ways to choose jumps until each state takes a character or the end: what is owed then, and banned."""
        # owed states to look at, those that stay; banned states to look at, all of them
        work = [(thread.owed, _NONE, thread.banned, thread.banned)]
        known = set(work)
        found = set()
        num_bytes = 0
        while work:
            check(num_bytes)
            pending, settled, refused, banned = work.pop()
            if refused:
                state = next(iter(refused))
                ways = [
                    (pending | owed, settled, refused - {state} | (more - banned), banned | more)
                    for owed, more in self._refusals(state, behind, thread.at_start)
                ]
            elif pending:
                state = next(iter(pending))
                left = pending - {state}
                if self._stays(state):
                    ways = [(left, settled | {state}, refused, banned)]
                else:
                    ways = [
                        (left | more, settled, refusing - banned, banned | refusing)
                        for more, refusing in self._choices(state, behind, thread.at_start)
                    ]
            else:
                way = settled, frozenset(state for state in banned if self._stays(state))
                if way not in found:
                    found.add(way)
                    yield way
                continue
            new = [way for way in ways if way not in known]
            work += new
            known.update(new)
            num_bytes += sum(_BYTES_OF_WAY + _BYTES_OF_STATE * sum(map(len, way)) for way in new)

    def _stays(self, state: int) -> bool:
        return state == _AT_END or state in self._program.moves

    def _choices(self, state: int, behind: _Behind, at_start: bool) -> Iterator[_Sets]:
        """The ways to leave an owed state without a character: what is owed instead, and banned."""
        if state == _MATCHED:
            yield _NONE, _NONE
        for asserted, target in self._program.jumps[state]:
            holds = asserted is None or self._holds(asserted, behind, at_start)
            if holds:
                yield frozenset({target}), _NONE
            elif holds is None and asserted is not None and asserted.entry is not None:
                looked = frozenset({asserted.entry})
                yield (frozenset({target}), looked) if asserted.refused else (looked | {target}, _NONE)

    def _refusals(self, state: int, behind: _Behind, at_start: bool) -> Iterator[_Sets]:
        """The ways in which nothing matches from a banned state on without a character: what is owed, and banned."""
        if state == _MATCHED:
            return
        each: list[tuple[_Sets, ...]] = []  # for each jump, of which none may lead to a match
        for asserted, target in self._program.jumps[state]:
            there: _Sets = _NONE, frozenset({target})
            holds = asserted is None or self._holds(asserted, behind, at_start)
            if holds:
                each.append((there,))
            elif holds is None and asserted is not None and asserted.entry is not None:
                looked = frozenset({asserted.entry})
                each.append(((looked, _NONE) if asserted.refused else (_NONE, looked), there))
        for ways in product(*each):
            yield _NONE.union(*(owed for owed, _ in ways)), _NONE.union(*(banned for _, banned in ways))


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
