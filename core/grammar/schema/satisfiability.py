"""Why nothing can satisfy a schema: where in it, and what excludes what."""

from __future__ import annotations

from collections.abc import Callable

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.schema.references import escape
from graftlm.core.grammar.schema.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.shapes import NOTHING, Array, Object, Reference, Shape


def blame(shape: Shape, pointer: str, algebra: ShapeAlgebra, close: Callable[[Shape], Shape]) -> tuple[str, str]:
    """The deepest required place of `shape`, found empty, at which nothing is possible, and why."""
    shape = close(algebra.resolve(shape.target) if isinstance(shape, Reference) else shape)
    if isinstance(shape, Object):
        for name in shape.required:
            member = algebra.member(shape, name)
            if not algebra.is_nothing(member):
                continue
            if shape.property(name) is None and member == NOTHING:
                return f"{pointer}/required", (
                    f"required property {name!r} is not declared and the object allows no others; declare it in "
                    "properties or set additionalProperties"
                )
            return blame(member, f"{pointer}/properties/{escape(name)}", algebra, close)
    if isinstance(shape, Array):
        for i, item in enumerate(shape.prefix[: shape.min_items]):
            if algebra.is_nothing(item):
                return blame(item, f"{pointer}/prefixItems/{i}", algebra, close)
        if shape.min_items > len(shape.prefix) and algebra.is_nothing(shape.items):
            return blame(shape.items, f"{pointer}/items", algebra, close)
    return pointer, "its keywords exclude every value"


def unending(rules: dict[str, Node]) -> list[str]:
    """The rules that derive no finite text."""
    ending: set[str] = set()
    while True:
        known: dict[int, bool] = {}
        more = {name for name, body in rules.items() if name not in ending and _can_end(body, ending, known)}
        if not more:
            return [name for name in rules if name not in ending]
        ending |= more


def _can_end(node: Node, ending: set[str], known: dict[int, bool]) -> bool:
    # nodes are shared: asking each once keeps a schema of nested references from taking for ever
    if id(node) not in known:
        match node:
            case ast.Rule(name):
                found = name in ending
            case ast.Concat(items):
                found = all(_can_end(item, ending, known) for item in items)
            case ast.Alternation(items):
                found = any(_can_end(item, ending, known) for item in items)
            case ast.Repeat(item, minimum, _):
                found = minimum == 0 or _can_end(item, ending, known)
            case ast.Series(items, _, nonempty):
                found = not nonempty or any(_can_end(item, ending, known) for item, _ in items)
            case _:
                found = True
        known[id(node)] = found
    return known[id(node)]
