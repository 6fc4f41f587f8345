"""Which rules of a grammar a pushdown automaton calls, and which are written out where they are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.kept_blocks import blocks_of
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.spec import Limits

_PLACES_OF_SET = 4
_PLACES_OF_STATE = 3
"""A state of an automaton counts as so many places, since subset construction has merged several places into it."""
_LARGE = 50
"""Places from which on a rule that is named more than once is called."""


@dataclass(frozen=True)
class Survey:
    """A node without the rules that it names.

    num_places  that it takes in an automaton, about
    rules       each as often as it is named
    """

    num_places: int
    rules: list[str]

    @classmethod
    def of(cls, node: Node) -> Survey:
        rules: list[str] = []
        return cls(_measure(node, {}, rules), rules)


def _measure(node: Node, places: dict[int, int], rules: list[str]) -> int:
    """Places of `node`; those of nodes are kept in `places`, by id, and the names of rules in `rules`."""
    if isinstance(node, ast.Literal):
        return len(node.data)
    if isinstance(node, ast.CharSet):
        return _PLACES_OF_SET
    if isinstance(node, ast.Rule):
        rules.append(node.name)
        return 1
    key = id(node)
    known = places.get(key)
    if known is not None:
        return known
    match node:
        case ast.Automaton():
            total = _PLACES_OF_STATE * node.num_states
        case ast.Difference(item, minus):
            total = _measure(item, places, rules) + _measure(minus, places, rules)
        case ast.Repeat(item, low, high):
            total = _measure(item, places, rules) * (low + 1 if high is None else high)
        case ast.Graph(rows):
            total = 0
            for row in rows:
                for item, _ in row:
                    total += _measure(item, places, rules)
        case ast.Concat(items) | ast.Alternation(items) | ast.Intersection(items):
            total = 0
            for item in items:
                total += _measure(item, places, rules)
        case _:
            total = 0
    places[key] = total
    return total


_kept_survey = lru_cache(maxsize=128)(Survey.of)


@dataclass(frozen=True)
class CallPlan:
    """Which rules are called, and which are written out where they are named; inner ones come first."""

    order: list[str]
    called: frozenset[str]


def plan_calls(node: Node, rules: Mapping[str, Node], limits: Limits) -> CallPlan:
    """Call the rules that are met inside themselves, and those that take many places and are named more than once.

    Raises GrammarError where all together take too many places, before any is written out.
    """
    surveys = {"": Survey.of(node)}
    times = Counter(surveys[""].rules)
    open_, done = dict[str, None](), list[str]()
    recursive: set[str] = set()
    work = [("", list(dict.fromkeys(surveys[""].rules)))]
    while work:
        name, left = work[-1]
        if not left:
            work.pop()
            if name:
                del open_[name]
                done.append(name)
            continue
        below = left.pop()
        if below in open_:
            recursive.add(below)
        elif below not in surveys:
            if below not in rules:
                known = ", ".join(rules) or "none"
                message = f"there is no rule {below!r}; give it along with the node that names it (given: {known})"
                raise GrammarError(message)
            check()
            body = rules[below]
            survey = surveys[below] = Survey.of(body) if blocks_of(body) is None else _kept_survey(body)
            times.update(survey.rules)
            open_[below] = None
            work.append((below, list(dict.fromkeys(survey.rules))))
    sizes: dict[str, int] = dict.fromkeys(recursive, 1)
    called, total = set(recursive), 0
    for name in [*done, ""]:
        survey = surveys[name]
        size = survey.num_places + sum([sizes[inner] for inner in survey.rules])
        if name in recursive or not name:
            total += size
        elif times[name] > 1 and size > _LARGE:
            called.add(name)
            total += size
            sizes[name] = 1
        else:
            sizes[name] = size
    if total > limits.states:
        raise GrammarError(
            f"the constraint takes about {total:,} places, the limit is {limits.states:,} states; "
            "make its counted repeats smaller or raise limits.states"
        )
    return CallPlan(done, frozenset(called))
