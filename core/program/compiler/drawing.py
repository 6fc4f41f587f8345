"""Drawing: the tree of a plan's calls as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftlm.core.program.compiler.plan import CallTree, PlannedCall
    from graftlm.core.program.compiler.trace import Key

COLUMN, ROW, MARGIN, HEIGHT = 150, 34, 10, 24
"""Distances of calls, and the height of a box, in pixels."""

MAX_CALLS = 200
"""Calls that are drawn, the first in depth-first order."""


def tree_svg(tree: CallTree, root: str = "prompt") -> str:
    """Draw a box for each call, to the right of the call that it continues.

    A dashed box is a call whose prompt may depend on an answer that the program's code has read. The tooltip of a box
    has the tokens of its KV.
    """
    order = _depth_first(tree, None)
    shown, more = order[:MAX_CALLS], len(order) - MAX_CALLS
    columns = _columns(tree, shown)
    rows = _rows(tree, shown)
    width = MARGIN * 2 + COLUMN * max(columns.values(), default=0) + 116
    height = MARGIN * 2 + ROW * (max(rows.values(), default=0) + (2 if more > 0 else 1))
    lines, boxes = [], [_box(0, rows[None], root, "", dashed=False)]
    for key in shown:
        call = tree.calls[key]
        column = columns[key]
        start = columns.get(call.after, 0) if call.after is not None else 0
        lines.append(_line(start, rows[call.after], column, rows[key]))
        boxes.append(_box(column, rows[key], call.name or "gen", _title(call), dashed=call.reads))
    if more > 0:
        boxes.append(f'<text x="{MARGIN}" y="{height - MARGIN}">and {more:,} more calls</text>')
    style = 'font-family="sans-serif" font-size="13" fill="none" stroke="#1668a7"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" role="img"><g {style}>{"".join(lines)}{"".join(boxes)}</g></svg>\n'
    )


def _depth_first(tree: CallTree, start: Key | None) -> list[Key]:
    found: list[Key] = []
    waiting = sorted(tree.next[start], reverse=True)
    while waiting:
        key = waiting.pop()
        found.append(key)
        waiting.extend(sorted(tree.next[key], reverse=True))
    return found


def _columns(tree: CallTree, keys: Sequence[Key]) -> dict[Key | None, int]:
    """Return the number of calls on the way to each call, itself included; 0 for the prompt."""
    found: dict[Key | None, int] = {None: 0}
    for key in keys:
        found[key] = found[tree.calls[key].after] + 1
    return found


def _rows(tree: CallTree, keys: Sequence[Key]) -> dict[Key | None, float]:
    """Return the row of each call: leaves one below the other, other calls in the middle of their successors."""
    found: dict[Key | None, float] = {}
    drawn, leaves = set(keys), 0
    for leaf in keys:
        if not drawn.intersection(tree.next[leaf]):
            found[leaf], leaves = float(leaves), leaves + 1
    for key in [*reversed(keys), None]:
        below = [found[after] for after in tree.next[key] if after in drawn]
        if key not in found:
            found[key] = (min(below) + max(below)) / 2 if below else 0.0
    return found


def _title(call: PlannedCall) -> str:
    return f"{call.tokens:,} tokens of KV, {call.answer:,} of them the answer at most"


def _box(column: int, row: float, label: str, title: str, *, dashed: bool) -> str:
    x, y = MARGIN + column * COLUMN, MARGIN + row * ROW
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    shown = label if len(label) <= 15 else label[:14] + "…"
    return (
        f'<g>{tooltip}<rect x="{x}" y="{y:.1f}" width="116" height="{HEIGHT}" rx="4"{dash}/><text x="{x + 58}" '
        f'y="{y + 16:.1f}" text-anchor="middle" fill="#888" stroke="none">{escape(shown)}</text></g>'
    )


def _line(column: int, row: float, to_column: int, to_row: float) -> str:
    x, y = MARGIN + column * COLUMN + 116, MARGIN + row * ROW + HEIGHT / 2
    to_x, to_y = MARGIN + to_column * COLUMN, MARGIN + to_row * ROW + HEIGHT / 2
    middle = (x + to_x) / 2
    return f'<path d="M{x} {y:.1f} C{middle} {y:.1f} {middle} {to_y:.1f} {to_x} {to_y:.1f}"/>'
