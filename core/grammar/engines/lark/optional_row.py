"""Rows of parts that may each be left out, with the same mark between two of them: the members of most objects."""

from __future__ import annotations

from graftlm.core.grammar import ast
from graftlm.core.grammar.engines.lark.walk import Rules
from graftlm.core.grammar.engines.lark.words import ITSELF, pair

_GROUP = 4
"""Parts of a row in one rule."""


def is_optional_row(node: ast.Graph) -> bool:
    """Whether the states are those of parts that may each be left out, in turn about to be written and passed."""
    rows, last = node.rows, len(node.rows) - 1
    if last < 4 or last % 2 or node.accepting != {0, last}:
        return False
    if [target for _, target in rows[last]] not in ([], [last - 1]):
        return False
    if not rows[2]:
        return False
    mark = rows[2][0][0]
    if rows[last] and rows[last][0][0] is not mark and rows[last][0][0] != mark:
        return False
    if [target for _, target in rows[0]] != list(range(1, last, 2)):
        return False
    if any([type(item) is not ast.Empty for item, _ in rows[0]]):  # equality of nodes takes far longer
        return False
    for i, part in enumerate(rows[1::2]):
        if len(part) != 1 or part[0][1] != 2 * i + 2 or type(part[0][0]) is ast.Empty:
            return False
    for i, after in enumerate(rows[2:last:2]):
        if len(after) != 2:
            return False
        (sign, target), (skip, passed) = after
        if target != 2 * i + 3 or passed != 2 * i + 4 or type(skip) is not ast.Empty:
            return False
        if sign is not mark and sign != mark:
            return False
    return True


def write_row(rules: Rules, mark: str, firsts: list[str], *, repeats: bool) -> str:
    """Define the rules of a row of parts, `firsts`, the last perhaps repeated; return the body of the first rule.

    A few parts have a rule of what they may begin with, and another of that after a mark, or nothing; so have a few
    of these, and so on. A parser then looks at the marks of few rules for what may come next, and nests few rules.
    """
    again = ""  # what the last part may be after a mark, if not once or not at all
    if repeats:
        again = rules.looping(f"{pair(pair(mark, firsts[-1]), ITSELF)}|")
        firsts[-1] = pair(firsts[-1], again)
    while True:
        starts = range(0, len(firsts), _GROUP)
        groups = [_group(rules, mark, firsts[i : i + _GROUP], again if i == starts[-1] else "") for i in starts]
        if len(groups) == 1:
            return "|".join([*groups[0], ""])
        if len(groups[-1]) > 1:
            again = ""
        bodies = ["|".join(ways) for ways in groups]
        firsts = [
            body if len(ways) == 1 else rules.shared(body) for body, ways in zip(bodies[1:], groups[1:], strict=True)
        ]
        # only the beginning of the row leads to the first of them, which is rather written there
        firsts.insert(0, rules.shared(bodies[0]) if "(" in bodies[0] else rules.written(bodies[0]))


def _group(rules: Rules, mark: str, firsts: list[str], again: str) -> list[str]:
    """The ways in which a text begins with one of these parts; `again` as above."""
    ways, rest = [firsts[-1]], ""
    for i in range(len(firsts) - 1, 0, -1):
        option = f"{pair(mark, firsts[i])}|"
        after = again or (rules.shared(option) if i > 1 else rules.written(option))
        rest, again = pair(after, rest) if rest else after, ""
        ways.append(pair(firsts[i - 1], rest))
    return ways[::-1]
