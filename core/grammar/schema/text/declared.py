"""Objects that only say what their members are: declared ones in order, then perhaps others. Most objects are."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import EMPTY, Node
from graftlm.core.grammar.schema.algebra.shapes import NOTHING, Object, Shape, both

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graftlm.core.grammar.schema.lowering import Lowering

MAX_WALK = 400
"""Members that may each be left out, above which a grammar with rules halves their list instead of walking it."""


def is_plain(shape: Shape) -> TypeGuard[Object]:
    """Whether nothing but its members decides about an object: no patterns, names or number of members."""
    return (
        isinstance(shape, Object)
        and not shape.patterns
        and shape.names is None
        and not shape.min_properties
        and shape.max_properties is None
    )


def members(lowering: Lowering, parts: Sequence[Object]) -> Node:
    """The text between the braces of what is all of these plain objects."""
    required = {name for part in parts for name in part.required}
    declared, additional = dict(parts[0].properties), parts[0].additional
    if len(parts) > 1:
        additional = both(*[part.additional for part in parts])
        listed = dict.fromkeys([name for part in parts for name, _ in part.properties])
        declared = {name: both(*[_member(part, name) for part in parts]) for name in listed}
    names = dict.fromkeys([*declared, *[name for part in parts for name in part.required]])
    values: dict[Shape, Node] = {}  # many members have one shape
    name_of, comma = lowering.tokens.name, lowering.tokens.comma
    written: list[tuple[Node, Node, bool]] = []
    for name in names:
        member = declared.get(name, additional)
        value = values.get(member)
        if value is None:
            value = values[member] = lowering.member_value(member)
        if not ast.is_nothing(value):
            written.append((name_of(name), value, name in required))
        elif name in required:
            return ast.NOTHING
    others = None
    if additional != NOTHING:
        value = lowering.member_value(additional)
        if not ast.is_nothing(value):
            others = ast.concat(lowering.tokens.key(lowering.tokens.other_names(list(names))), value)
    first = next((i for i, (_, _, is_required) in enumerate(written) if is_required), None)
    if first is None:
        return _first_of(lowering, [ast.concat(*member[:2]) for member in written], others, needed=False)
    after: list[Node] = []
    for key, value, is_required in written[first + 1 :]:
        node = ast.concat(comma, key, value)
        after.append(node if is_required else ast.optional(node))
    if others is not None:
        after.append(ast.star(ast.concat(comma, others)))
    if first == 0:
        return ast.concat(*written[0][:2], *after)
    needed = [ast.concat(*member[:2]) for member in written[: first + 1]]
    return ast.concat(_first_of(lowering, needed, None, needed=True), *after)


def _member(shape: Object, name: str) -> Shape:
    """What a plain object says of a member."""
    declared = shape.property(name)
    return shape.additional if declared is None else declared


def _first_of(lowering: Lowering, written: list[Node], others: Node | None, *, needed: bool) -> Node:
    """Members that may each be left out, the last of them not if it is `needed`, then any number of `others`.

    State 0 has written nothing, 2 i + 1 is about to write member i, 2 i + 2 has passed it.
    """
    nodes, comma = [*written, *([others] if others is not None else [])], lowering.tokens.comma
    if lowering.tokens.has_rules and len(nodes) > MAX_WALK:
        return _Halves(lowering, nodes, repeats=others is not None, needed=needed).text()
    rows: list[list[tuple[Node, int]]] = [[(EMPTY, 2 * i + 1) for i in range(len(nodes))]]
    last = 2 * len(nodes)
    for i, node in enumerate(nodes):
        rows.append([(node, 2 * i + 2)])
        repeats = others is not None and i == len(nodes) - 1
        following = [(comma, 2 * i + 3)] if i + 1 < len(nodes) else []
        skips = i + 1 < len(nodes) and not (needed and i + 2 == len(nodes))
        rows.append([*following, *([(EMPTY, 2 * i + 4)] if skips else []), *([(comma, 2 * i + 1)] if repeats else [])])
    ends = {last} if needed else {0, last}
    if len(nodes) < 2:
        return ast.graph(rows, ends)
    return ast.Graph(tuple(map(tuple, rows)), frozenset(ends))  # it has nothing to simplify


class _Halves:
    """The same by rules for halves of the list, halves of those, and so on: a parser nests them but a few deep.

    repeats  whether the last node may come any number of times
    needed   whether it must come
    """

    def __init__(self, lowering: Lowering, nodes: list[Node], *, repeats: bool, needed: bool) -> None:
        self._token, self._comma = lowering.tokens.token, lowering.tokens.comma
        self._named = list(map(self._token, nodes))
        self._repeats, self._needed = repeats, needed

    def text(self) -> Node:
        text = self._first(0, len(self._named))
        return text if self._needed else ast.optional(text)

    def _first(self, low: int, high: int) -> Node:
        """The text from a member on that is the first to be written."""
        if high - low == 1:
            node = self._named[low]
            return ast.concat(node, self._after(low, high)) if self._repeats and self._is_last(low) else node
        middle = (low + high) // 2
        return ast.alternation(
            ast.concat(self._first(low, middle), self._after(middle, high)), self._first(middle, high)
        )

    def _after(self, low: int, high: int) -> Node:
        """What of these members may follow others; often nothing."""
        if high - low == 1:
            node = ast.concat(self._comma, self._named[low])
            if self._is_last(low) and (self._repeats or self._needed):
                return ast.star(node) if self._repeats else node
            return ast.optional(node)
        middle = (low + high) // 2
        return self._token(ast.concat(self._after(low, middle), self._after(middle, high)))

    def _is_last(self, index: int) -> bool:
        return index == len(self._named) - 1
