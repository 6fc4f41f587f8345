"""Which rules of a grammar a pushdown automaton calls, and which are written out where they are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import TooManyStates, check
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.nodes.sizes import survey
from graftlm.core.grammar.spec import Limits

_LARGE = 50
"""Places from which on a rule that is named more than once is called."""


@dataclass(frozen=True)
class CallPlan:
    """Which rules are called, and which are written out where they are named; inner ones come first."""

    order: list[str]
    called: frozenset[str]


def plan_calls(node: Node, rules: Mapping[str, Node], limits: Limits) -> CallPlan:
    """Call the rules that are met inside themselves, and those that take many places and are named more than once.

    Raises GrammarError where all together take too many places, before any is written out.
    """
    surveys = {"": survey(node)}
    open_, done = dict[str, None](), list[str]()
    recursive: set[str] = set()
    work = [("", list(surveys[""].inner))]
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
            found = surveys[below] = survey(rules[below])
            open_[below] = None
            work.append((below, list(found.inner)))
    times = Counter(chain.from_iterable([found.rules for found in surveys.values()]))
    sizes: dict[str, int] = dict.fromkeys(recursive, 1)
    called, total = set(recursive), 0
    for name in [*done, ""]:
        found = surveys[name]
        size = found.num_places + sum([sizes[inner] for inner in found.rules])
        if name in recursive or not name:
            total += size
        elif times[name] > 1 and size > _LARGE:
            called.add(name)
            total += size
            sizes[name] = 1
        else:
            sizes[name] = size
    if total > limits.states:
        raise TooManyStates(
            f"the constraint takes about {total:,} places, the limit is {limits.states:,} states; "
            "make its counted repeats smaller or raise limits.states"
        )
    return CallPlan(done, frozenset(called))
