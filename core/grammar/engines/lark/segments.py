"""The rules of a long walk, in llguidance's dialect of Lark, which nest but a few deep.

`Walk` nests each state inside the one before it: llguidance recurses as deep when it compiles, and whenever a text is
complete it goes back through all states that were passed. Here a walk is cut in two, both halves are cut again, and so
on, and a rule says how a text gets from one state to another within a part. That takes few rules where few states lie
at a cut: an object or array has those of one member or item there, however many come before and after.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.engines.lark.walk import Rules
from graftlm.core.grammar.engines.lark.words import pair

_SHORTEST = 12
"""States of a part that is cut no more, as far as loops allow."""
_MOST_IN_LOOPS = 1_000
"""States of one loop, which cannot be cut."""
_MOST_RULES = 65_000
"""Rules of one walk: llguidance's parser holds no more symbols."""
_END = -1
"""The target of a text that ends."""


class Segments:
    """The rules of a Graph. A part is a range of levels: a state leads to later levels, or within a loop to its own."""

    def __init__(self, graph: ast.Graph, writer: Rules) -> None:
        self._graph = graph = _with_marks_shared(graph)
        self._writer = writer
        self._levels, self._level_of = _levels(graph)
        sizes = [len(states) for states in self._levels]
        self._before = [0, *accumulate(sizes)]  # states before each level
        self._crossings = self._count_crossings()
        self._rules: dict[tuple[int, int, int, int], str | None] = {}
        self._ways: dict[tuple[int, int, int, int], str | None] = {}
        self._choices: dict[tuple[int, int, int, int], list[str]] = {}  # the ways of rules that are not loops
        self._exits: dict[tuple[int, int], list[int]] = {}
        self._items: dict[int, list[str]] = {}

    def write(self) -> str:
        """Define the rules; return the first one's name."""
        name = self._between(0, len(self._levels), 0, _END)
        if name is None:
            raise GrammarError("nothing can satisfy the constraint: no text matches it")
        return name or '""'

    def _count_crossings(self) -> list[int]:
        """To how many later states earlier ones lead, over the beginning of each level."""
        changes = [0] * (len(self._levels) + 1)
        earliest = list(self._level_of)
        for states in self._levels:
            for state in states:
                for _, target in self._graph.rows[state]:
                    earliest[target] = min(earliest[target], self._level_of[state])
        for states in self._levels:
            for state in states:  # counts for each cut after the first that leads to it, up to its own level
                changes[earliest[state] + 1] += 1
                changes[self._level_of[state] + 1] -= 1
        return list(accumulate(changes))

    def _cut(self, low: int, high: int) -> int:
        """The level between `low` and `high` at which fewest states are led to, near the middle."""
        quarter = (self._before[high] - self._before[low]) // 4
        first, last = self._before[low] + quarter, self._before[high] - quarter
        near = [level for level in range(low + 1, high) if first <= self._before[level] <= last]
        middle = (first + last) // 2
        return min(
            near or range(low + 1, high),
            key=lambda level: (self._crossings[level], abs(self._before[level] - middle)),
        )

    def _between(self, low: int, high: int, source: int, target: int) -> str | None:
        """What leads from a state of these levels to one beyond them, or to the end; None if nothing does."""
        key = (low, high, source, target)
        if key in self._rules:
            return self._rules[key]
        if len(self._rules) + len(self._ways) > _MOST_RULES:
            raise GrammarError(
                f"an object or array takes more than {_MOST_RULES:,} rules, the limit of llguidance's parser; "
                "let fewer combinations of its members be told apart"
            )
        check()
        if high - low == 1 or self._before[high] - self._before[low] <= _SHORTEST:
            found = self._walk(low, high, source, target)
        else:
            middle = self._cut(low, high)
            if self._level_of[source] >= middle:
                found = self._between(middle, high, source, target)
            else:
                found = self._joined(low, middle, high, source, target)
        self._rules[key] = found
        return found

    def _joined(self, low: int, middle: int, high: int, source: int, target: int) -> str | None:
        ways = []
        for between in self._leaving(low, middle):
            first = self._between(low, middle, source, between) if between != target else None
            if first is None or between == _END or self._level_of[between] >= high:
                continue
            second = self._between(middle, high, between, target)
            if second is not None:
                ways.append(pair(first, second) if first and second else first or second)
        if target in self._leaving(low, middle):
            direct = self._between(low, middle, source, target)
            if direct is not None:
                ways.append(direct)
        return self._rule(ways)

    def _leaving(self, low: int, high: int) -> list[int]:
        """The states beyond these levels to which those lead, and perhaps the end."""
        found = self._exits.get((low, high))
        if found is None:
            states = [state for level in self._levels[low:high] for state in level]
            exits = {target: None for state in states for _, target in self._graph.rows[state]}
            found = [state for state in exits if self._level_of[state] >= high]
            if any(state in self._graph.accepting for state in states):
                found.append(_END)
            self._exits[low, high] = found
        return found

    def _walk(self, low: int, high: int, source: int, target: int) -> str | None:
        """The same of a short part: a rule for each state."""
        levels = range(high - 1, self._level_of[source] - 1, -1)
        inside = [
            state
            for level in levels
            for state in self._levels[level]
            if (key := (low, high, state, target)) not in self._ways and key not in self._choices
        ]
        looping = {state for state in inside if len(self._levels[self._level_of[state]]) > 1 or self._is_loop(state)}
        reaching = self._reaching(inside, (low, high, target))
        for state in inside:
            if state not in reaching:
                self._ways[low, high, state, target] = None
            elif state in looping:
                self._ways[low, high, state, target] = self._writer.fresh()
        for state in inside:
            if state not in reaching:
                continue
            ways = [""] if target == _END and state in self._graph.accepting else []
            for item, after in self._texts(state):
                key = (low, high, after, target)
                if not item and key in self._choices:  # one rule less for each to read
                    ways += self._choices[key]
                elif (rest := "" if after == target else self._way(key)) is not None:
                    ways.append(pair(item, rest) if item and rest else item or rest)
            known = self._ways.get((low, high, state, target))
            if known is None:
                self._choices[low, high, state, target] = ways
            else:
                self._writer.define(known, *dict.fromkeys(ways))
        return self._way((low, high, source, target))

    def _way(self, key: tuple[int, int, int, int]) -> str | None:
        """The rule of a state of a short part, defined when it is first named: many are only written out elsewhere."""
        if key not in self._ways and key in self._choices:
            self._ways[key] = self._rule(self._choices[key])
        return self._ways.get(key)

    def _reaching(self, states: list[int], part: tuple[int, int, int]) -> set[int]:
        """Those of `states`, last ones first, that lead to the target of a part."""
        low, high, target = part
        found: set[int] = set()
        is_changed = True
        while is_changed:
            is_changed = False
            for state in states:
                if state in found:
                    continue
                row = self._graph.rows[state]
                if (
                    (target == _END and state in self._graph.accepting)
                    or any([after == target or after in found for _, after in row])
                    or any([self._leads((low, high, after, target)) for _, after in row])
                ):
                    found.add(state)
                    is_changed = True
        return found

    def _leads(self, key: tuple[int, int, int, int]) -> bool:
        return key in self._choices or self._ways.get(key) is not None

    def _is_loop(self, state: int) -> bool:
        return any([target == state for _, target in self._graph.rows[state]])

    def _texts(self, state: int) -> list[tuple[str, int]]:
        found = self._items.get(state)
        if found is None:
            found = self._items[state] = [
                "" if type(item) is ast.Empty else self._writer.in_sequence(item) for item, _ in self._graph.rows[state]
            ]
        return [(text, target) for text, (_, target) in zip(found, self._graph.rows[state], strict=True)]

    def _rule(self, ways: list[str]) -> str | None:
        """The name of a rule of these ways; empty for the empty text, None if there are none."""
        if not ways:
            return None
        body = "|".join(dict.fromkeys(ways))
        return self._writer.shared(body) if body else ""


def _with_marks_shared(graph: ast.Graph) -> ast.Graph:
    """The same language, where a mark that may be followed by what many states ask for is written in one way.

    A state that may be passed in silence has, like the next one, the mark (a comma) and then a member. Written as it
    is, each of the members that may come next would begin with a mark of its own, and a parser would keep track of all
    of them. Here the mark comes first, and then the choice.
    """
    rows = graph.rows
    marks = Counter([id(item) for row in rows for item, _ in row if type(item) is not ast.Empty])
    mark = max((item for row in rows for item, _ in row), key=lambda item: marks[id(item)], default=ast.EMPTY)
    loops = _loops(graph)
    if any([len(loop) > 1 and any([type(item) is ast.Empty for i in loop for item, _ in rows[i]]) for loop in loops]):
        return graph
    silent = [[target for item, target in row if type(item) is ast.Empty] for row in rows]
    marked = [[target for item, target in row if item is mark] for row in rows]
    grown: list[list[tuple[Node, int]]] = [list(row) for row in rows]
    accepting = set(graph.accepting)
    choices: dict[int, int] = {}  # of states: what may come after the mark
    bare: dict[int, int | None] = {}  # the same state where no mark may follow; None where nothing may

    def place(row: list[tuple[Node, int]]) -> int:
        grown.append(row)
        return len(grown) - 1

    for state in [state for loop in loops for state in loop]:  # each after those that it leads to in silence
        after = [choices[target] for target in silent[state] if target in choices]
        if not marked[state] and not after:
            bare[state] = state
            continue
        choices[state] = place([(ast.EMPTY, target) for target in (*marked[state], *after)])
        left: list[tuple[Node, int]] = [(ast.EMPTY, to) for target in silent[state] if (to := bare[target]) is not None]
        left += [(item, target) for item, target in rows[state] if type(item) is not ast.Empty and item is not mark]
        grown[state] = [(mark, choices[state]), *left]
        if len(left) == 1 and type(left[0][0]) is ast.Empty and state not in accepting:
            bare[state] = left[0][1]
        elif left or state in accepting:
            bare[state] = place(left)
            if state in accepting:
                accepting.add(len(grown) - 1)
        else:
            bare[state] = None
    return ast.Graph(tuple(map(tuple, grown)), frozenset(accepting))


def depth(graph: ast.Graph) -> int:
    """How many states a text passes at most, those of a loop counted once."""
    loops = _loops(graph)
    return _heights(_after(graph, loops))[-1]


def _after(graph: ast.Graph, loops: list[list[int]]) -> list[set[int]]:
    """The loops to which each loop leads, by their numbers, which are smaller than its own."""
    loop_of = {state: i for i, states in enumerate(loops) for state in states}
    return [
        {loop_of[target] for state in states for _, target in graph.rows[state]} - {i} for i, states in enumerate(loops)
    ]


def _heights(after: list[set[int]]) -> list[int]:
    """How many loops a text passes at most, each one with those after it."""
    found = list[int]()
    for targets in after:
        found.append(1 + max([found[j] for j in targets], default=0))
    return found


def _levels(graph: ast.Graph) -> tuple[list[list[int]], list[int]]:
    """The states in an order in which each leads to later ones; those of a loop are on one level.

    -> the states of each level, and the level of each state, -1 where nothing leads to it. Raises GrammarError for a
    loop that is too long.
    """
    loops = _loops(graph)
    longest = max(map(len, loops))
    if longest > _MOST_IN_LOOPS:
        raise GrammarError(
            f"a part of an object or array that repeats takes {longest:,} places, the limit of a context-free "
            f"grammar is {_MOST_IN_LOOPS:,}; let fewer combinations of its members be told apart"
        )
    after = _after(graph, loops)
    heights = _heights(after)
    depths = [0] * len(loops)  # how many may come before
    for i in range(len(loops) - 1, -1, -1):
        for j in after[i]:
            depths[j] = max(depths[j], depths[i] + 1)
    keys = [[-height for height in heights], depths, [d - h for d, h in zip(depths, heights, strict=True)]]
    orders = [sorted(range(len(loops)), key=key.__getitem__) for key in keys]
    best = min(orders, key=lambda order: _width(order, after))
    level_of = [-1] * len(graph.rows)
    levels = [loops[i] for i in best]
    for level, states in enumerate(levels):
        for state in states:
            level_of[state] = level
    return levels, level_of


def _width(order: list[int], after: list[set[int]]) -> int:
    """How much crosses the cuts of an order, wide cuts counting more."""
    at = {loop: level for level, loop in enumerate(order)}
    changes = [0] * (len(order) + 1)
    earliest = dict[int, int]()
    for i in order:
        for j in after[i]:
            earliest.setdefault(j, at[i])
    for j, first in earliest.items():
        changes[first + 1] += 1
        changes[at[j] + 1] -= 1
    return sum([width * width for width in accumulate(changes)])


def _loops(graph: ast.Graph) -> list[list[int]]:
    """The strongly connected states that can be reached, those that others lead to first (Tarjan's algorithm)."""
    index, lowest = {0: 0}, {0: 0}
    open_, found = [0], list[list[int]]()
    is_open = {0}
    work = [(0, iter([target for _, target in graph.rows[0]]))]
    while work:
        state, targets = work[-1]
        after = next(targets, None)
        if after is None:
            work.pop()
            if work:
                lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[state])
            if lowest[state] == index[state]:
                at = open_.index(state) if open_[-1] != state else len(open_) - 1
                found.append(open_[at:])
                is_open -= set(open_[at:])
                del open_[at:]
        elif after not in index:
            index[after] = lowest[after] = len(index)
            open_.append(after)
            is_open.add(after)
            work.append((after, iter([target for _, target in graph.rows[after]])))
        elif after in is_open:
            lowest[state] = min(lowest[state], index[after])
    return found
