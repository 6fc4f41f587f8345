"""Objects that only say what their members are: declared ones in order, then perhaps others. Most objects are."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.schema.algebra.shapes import NOTHING, Object, Shape, both

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graftlm.core.grammar.schema.lowering import Lowering


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
    listed, required, additional = parts[0].properties, parts[0].required, parts[0].additional
    if len(parts) > 1:
        required = tuple([name for part in parts for name in part.required])
        additional = both(*[part.additional for part in parts])
        names = dict.fromkeys([name for part in parts for name, _ in part.properties])
        listed = tuple([(name, both(*[_member(part, name) for part in parts])) for name in names])
    asked = frozenset(required)
    if asked:
        left = dict.fromkeys(required, additional)
        for name, _ in listed:
            left.pop(name, None)
        listed = (*listed, *left.items()) if left else listed
    known = lowering.members
    written: list[Node] = []
    needed: list[int] = []
    for pair in listed:
        node = known.get(pair)
        if node is None:
            node = known[pair] = _named(lowering, *pair)
        if node is nodes.NOTHING:
            if pair[0] in asked:
                return node
            continue
        if pair[0] in asked:
            needed.append(len(written))
        written.append(node)
    others = None
    if additional != NOTHING:
        value = lowering.member_value(additional)
        if not nodes.is_nothing(value):
            names_but = lowering.tokens.other_names([name for name, _ in listed])
            others = nodes.concat(lowering.tokens.key(names_but), value)
    return in_order(lowering, written, needed, others)


def _named(lowering: Lowering, name: str, shape: Shape) -> Node:
    """The text of a member, which many objects may have; NOTHING where no value has its shape."""
    value = lowering.member_nodes.get(shape)
    if value is None:
        value = lowering.member_nodes[shape] = lowering.member_value(shape)
    return nodes.NOTHING if nodes.is_nothing(value) else nodes.concat(lowering.tokens.name(name), value)


def in_order(lowering: Lowering, written: list[Node], needed: Sequence[int], others: Node | None) -> Node:
    """The text of members in a row, then any number of others.

    needed  the places of members that may not be left out, in order
    """
    if not needed:
        return _first_of(lowering, written, others, needed=False)
    comma, first, is_needed = lowering.tokens.comma, needed[0], set(needed)
    after: list[Node] = []
    for place in range(first + 1, len(written)):
        node = nodes.concat(comma, written[place])
        after.append(node if place in is_needed else nodes.optional(node))
    if others is not None:
        after.append(nodes.star(nodes.concat(comma, others)))
    if first == 0:
        return nodes.concat(written[0], *after)
    return nodes.concat(_first_of(lowering, written[: first + 1], None, needed=True), *after)


def _member(shape: Object, name: str) -> Shape:
    """What a plain object says of a member."""
    declared = shape.property(name)
    return shape.additional if declared is None else declared


def _first_of(lowering: Lowering, written: list[Node], others: Node | None, *, needed: bool) -> Node:
    """Members that may each be left out, the last of them not if it is `needed`, then any number of `others`.

    State 0 has written nothing, 2 i + 1 is about to write member i, 2 i + 2 has passed it.
    """
    members, comma = [*written, *([others] if others is not None else [])], lowering.tokens.comma
    count, last = len(members), 2 * len(members)
    # objects have these edges alike, which are made once: most of a large schema's nodes would be such
    starts, passed = lowering.tokens.starts_and_passed(count)
    rows: list[tuple[tuple[Node, int], ...]] = [()] * (last + 1)
    rows[0] = starts[:count]
    rows[1::2] = [((node, target),) for node, target in zip(members, range(2, last + 1, 2), strict=True)]
    rows[2::2] = passed[:count]
    if count:
        rows[last] = () if others is None else ((comma, last - 1),)
    if needed and count > 1:
        rows[last - 2] = rows[last - 2][:1]
    ends = {last} if needed else {0, last}
    if count < 2:
        return nodes.graph(rows, ends)
    return nodes.Graph(tuple(rows), frozenset(ends))  # it has nothing to simplify
