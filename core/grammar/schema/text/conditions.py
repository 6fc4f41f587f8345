"""Objects under conditions on which members there are: one walk for all of their cases.

What `if`, `oneOf` and `dependentRequired` say of an object that is declared elsewhere multiplies its cases, which have
the same members. One walk keeps track of the conditions instead; it has a fraction of their places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Both,
    Literals,
    Not,
    Object,
    Shape,
    Union,
    both,
)
from graftlm.core.grammar.schema.text.branches import leaves
from graftlm.core.grammar.schema.text.items import is_one_walk
from graftlm.core.grammar.schema.text.members import ways_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graftlm.core.grammar.schema.lowering import Lowering
    from graftlm.core.grammar.schema.text.member_ways import MemberWays

_FEW_CASES = 2
_MAX_STATES = 250
"""States of one walk; it takes up to four places for each, and a grammar of tokens allows 1,000."""


def to_walk(lowering: Lowering, narrowed: Shape) -> list[tuple[Shape, ...]]:
    """The cases of a narrowed shape; if they are too many, or one walk for all of them is smaller, its parts as one.

    The text is the same: members have one order in all cases, and strict mode allows the same others.
    """
    cases = lowering.algebra.cases.of(narrowed)
    if cases is None or is_one_walk(narrowed, len(cases)):
        return [(narrowed,)]
    if len(cases) <= _FEW_CASES or not isinstance(narrowed, Both):
        return cases
    conditions = [leaf for part in narrowed.parts if isinstance(part, Union) for leaf in leaves(part)]
    if not all(map(_is_condition, conditions)) or not _are_excluded_too(narrowed, conditions):
        return cases
    declaring = [part for part in narrowed.parts if isinstance(part, Object)]
    if any(part.counts_names for part in declaring) or not _closes_alike(lowering, declaring, conditions):
        return cases
    names = _names(narrowed.parts)
    if any([_names(case) != names for case in cases]):
        return cases
    ways = ways_of(lowering, both(*lowering.close(narrowed.parts)))
    return [narrowed.parts] if _is_small(ways, len(cases)) else cases


def _is_condition(leaf: Shape) -> bool:
    """Whether an object only says which members there are, or what constants they are."""
    return (
        isinstance(leaf, Object)
        and leaf.additional == ANYTHING
        and not leaf.patterns
        and leaf.names is None
        and not leaf.min_properties
        and leaf.max_properties is None
        and all([shape in (ANYTHING, NOTHING) or isinstance(shape, Literals) for _, shape in leaf.properties])
    )


def _are_excluded_too(narrowed: Both, conditions: Iterable[Shape]) -> bool:
    """Whether the constants of each member are excluded in some case: then one walk tells no more values apart."""
    excluded: set[tuple[str, Shape]] = set()
    work: list[Shape] = list(narrowed.parts)
    while work:
        match work.pop():
            case Union(parts) | Both(parts):
                work += parts
            case Not(Object() as leaf):
                excluded.update(leaf.properties)
            case _:
                pass
    named = [member for leaf in conditions if isinstance(leaf, Object) for member in leaf.properties]
    return all([member in excluded for member in named if isinstance(member[1], Literals)])


def _closes_alike(lowering: Lowering, declaring: Sequence[Object], conditions: Iterable[Shape]) -> bool:
    """Whether strict mode allows the same other members in each case."""
    if not lowering.strict or any([part.closed for part in declaring]):
        return True
    declared = {name for part in declaring for name, _ in part.properties}
    return bool(declared) and all(
        not leaf.closed and all([name in declared for name, _ in leaf.properties])
        for leaf in conditions
        if isinstance(leaf, Object)
    )


def _is_small(ways: MemberWays, num_cases: int) -> bool:
    """Whether one walk has no more states than the walks of so many cases have together."""
    most = min(num_cases * (len(ways.names) + 1), _MAX_STATES)
    seen, work = {ways.start}, [ways.start]
    while work and len(seen) <= most:
        found = ways.of(work.pop())
        after = [target for _, _, target in found.present]
        for state in after if found.absent is None else (*after, found.absent):
            if state not in seen:
                seen.add(state)
                work.append(state)
    return len(seen) <= most


def _names(parts: Iterable[Shape]) -> list[str]:
    """The names of members in the order of their text."""
    objects = [leaf for part in parts for leaf in leaves(part) if isinstance(leaf, Object)]
    return list(
        dict.fromkeys(
            [name for leaf in objects for name, _ in leaf.properties]
            + [name for leaf in objects for name in leaf.required]
        )
    )
