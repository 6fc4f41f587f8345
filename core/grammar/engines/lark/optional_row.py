"""Rows of parts that may each be left out, with the same mark between two of them: the members of most objects."""

from __future__ import annotations

from graftlm.core.grammar import ast


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
    first = range(1, last, 2)
    if len(rows[0]) != len(first) or any(
        [target != i or type(item) is not ast.Empty for (item, target), i in zip(rows[0], first, strict=True)]
    ):
        return False
    for i in range(1, last, 2):
        part, after = rows[i], rows[i + 1]
        if len(part) != 1 or part[0][1] != i + 1 or type(part[0][0]) is ast.Empty:
            return False
        if i + 1 < last:
            if len(after) != 2 or after[0][1] != i + 2 or (after[0][0] is not mark and after[0][0] != mark):
                return False
            skip, target = after[1]
            if target != i + 3 or type(skip) is not ast.Empty:  # equality of nodes takes far longer
                return False
    return True
