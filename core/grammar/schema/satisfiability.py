"""Why nothing can satisfy a schema: where in it, and what excludes what."""

from __future__ import annotations

from collections.abc import Callable

from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.positions import INFINITE
from graftlm.core.grammar.automata.shortest import ShortestTexts
from graftlm.core.grammar.schema.references import escape
from graftlm.core.grammar.schema.shape_algebra import KINDS, ShapeAlgebra, item_at
from graftlm.core.grammar.schema.shapes import NOTHING, Array, Object, Shape, both

Close = Callable[[tuple[Shape, ...]], tuple[Shape, ...]]


def blame(shape: Shape, pointer: str, algebra: ShapeAlgebra, close: Close) -> tuple[str, str]:
    """The deepest required place of `shape`, found empty, at which nothing is possible, and why."""
    for case in algebra.cases(algebra.narrow(shape, "object")) or []:
        objects = [part for part in close(case) if isinstance(part, Object)]
        for name in dict.fromkeys(name for part in objects for name in part.required):
            member = both(*(algebra.member(part, name) for part in objects))
            if not any(part.property(name) is not None for part in objects) and member == NOTHING:
                return f"{pointer}/required", (
                    f"required property {name!r} is not declared and the object allows no others; declare it in "
                    "properties or set additionalProperties"
                )
            if _is_empty(member, algebra, close):
                return blame(member, f"{pointer}/properties/{escape(name)}", algebra, close)
    for case in algebra.cases(algebra.narrow(shape, "array")) or []:
        arrays = [part for part in case if isinstance(part, Array)]
        low, length = (
            max((f(part) for part in arrays), default=0) for f in (lambda a: a.min_items, lambda a: len(a.prefix))
        )
        for i in range(min(low, length + 1)):
            item = both(*(item_at(part, i) for part in arrays))
            if _is_empty(item, algebra, close):
                return blame(item, f"{pointer}/{f'prefixItems/{i}' if i < length else 'items'}", algebra, close)
    return pointer, "its keywords exclude every value"


def _is_empty(shape: Shape, algebra: ShapeAlgebra, close: Close) -> bool:
    """As `algebra.is_nothing`, with objects closed as strict mode has it."""
    if algebra.is_nothing(shape):
        return True
    if any(algebra.narrow(shape, kind) != NOTHING for kind in KINDS if kind != "object"):
        return False
    cases = algebra.cases(algebra.narrow(shape, "object"))
    return cases is not None and all(_no_member(close(case), algebra) for case in cases)


def _no_member(case: tuple[Shape, ...], algebra: ShapeAlgebra) -> bool:
    objects = [part for part in case if isinstance(part, Object)]
    names = {name for part in objects for name in part.required}
    return any(algebra.is_nothing(both(*(algebra.member(part, name) for part in objects))) for name in names)


def unending(rules: dict[str, Node]) -> list[str]:
    """The rules that derive no finite text."""
    return [name for name, length in ShortestTexts(rules).of_rule.items() if length == INFINITE]
