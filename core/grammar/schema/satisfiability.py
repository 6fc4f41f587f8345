"""Satisfiability: where in a schema nothing can satisfy it, and which keywords exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graftlm.core.grammar.budget import check
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.nodes.sizes import survey
from graftlm.core.grammar.schema.algebra.kinds import KINDS
from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
from graftlm.core.grammar.schema.algebra.shapes import NOTHING, Array, Object, Shape, both, item_at
from graftlm.core.grammar.schema.reading.references import escape

Close = Callable[[tuple[Shape, ...]], tuple[Shape, ...]]


def blame(shape: Shape, pointer: str, algebra: ShapeAlgebra, close: Close) -> tuple[str, str]:
    """The deepest required place of `shape`, found empty, at which nothing is possible, and why."""
    for case in algebra.cases.of(algebra.narrow(shape, "object")) or []:
        objects = [part for part in close(case) if isinstance(part, Object)]
        for name in dict.fromkeys(name for part in objects for name in part.required):
            member = both(*(algebra.member(part, name) for part in objects))
            declaring = [part for part in objects if part.property(name) is not None]
            if not declaring and member == NOTHING:
                return f"{pointer}/required", (
                    f"required property {name!r} is not declared and the object allows no others; declare it in "
                    "properties or set additionalProperties"
                )
            if any(
                part not in declaring and part.names is None and algebra.member(part, name) == NOTHING
                for part in objects
            ):
                return f"{pointer}/required", (
                    f"required property {name!r} is declared in one schema of allOf or a $ref, and another allows only "
                    "properties of its own; declare it there, or replace additionalProperties by unevaluatedProperties"
                )
            if _is_empty(member, algebra, close):
                return blame(member, f"{pointer}/properties/{escape(name)}", algebra, close)
    for case in algebra.cases.of(algebra.narrow(shape, "array")) or []:
        arrays = [part for part in case if isinstance(part, Array)]
        low, length = (
            max((f(part) for part in arrays), default=0) for f in (lambda a: a.min_items, lambda a: len(a.prefix))
        )
        for i in range(min(low, length + 1)):
            item = both(*(item_at(part, i) for part in arrays))
            if _is_empty(item, algebra, close):
                return blame(item, f"{pointer}/{f'prefixItems/{i}' if i < length else 'items'}", algebra, close)
    return pointer, "its keywords exclude every value; loosen or remove one of them"


def _is_empty(shape: Shape, algebra: ShapeAlgebra, close: Close) -> bool:
    """As `algebra.is_nothing`, with objects closed as strict mode has it."""
    if algebra.is_nothing(shape):
        return True
    if any(algebra.narrow(shape, kind) != NOTHING for kind in KINDS if kind != "object"):
        return False
    cases = algebra.cases.of(algebra.narrow(shape, "object"))
    return cases is not None and all(_no_member(close(case), algebra) for case in cases)


def _no_member(case: tuple[Shape, ...], algebra: ShapeAlgebra) -> bool:
    objects = [part for part in case if isinstance(part, Object)]
    names = {name for part in objects for name in part.required}
    return any(algebra.is_nothing(both(*(algebra.member(part, name) for part in objects))) for name in names)


def unending(rules: dict[str, Node], ending: Iterable[str] = ()) -> list[str]:
    """Return the rules that derive no finite string; those of `ending` do."""
    found = _Endings(rules, ending)
    if found.look():
        return []
    while True:
        before = len(found.rules)
        left = [name for name in rules if not found.rule(name)]
        if not left or len(found.rules) == before:
            return left
        check()
        found.open.clear()


_COMPOSED = (nodes.Concat, nodes.Alternation, nodes.Repeat, nodes.Graph)


class _Endings:
    """Which rules and nodes surely derive a finite text; what a rule in question needs of itself counts as none.

    rules  those that do
    open   those that were asked about in this round
    """

    def __init__(self, rules: dict[str, Node], ending: Iterable[str]) -> None:
        self._bodies = rules
        self._nodes: set[int] = set()
        self.rules = {name for name, body in rules.items() if type(body) is nodes.Literal}.union(ending)
        self.open: set[str] = set()

    def look(self) -> bool:
        """Note the rules that end as those before them do, which mostly are all. -> whether they are"""
        left = False
        for name, body in self._bodies.items():
            if name not in self.rules:
                found = survey(body)
                if found.ends and self.rules.issuperset(found.inner):
                    self.rules.add(name)
                else:
                    left = True
        return not left

    def rule(self, name: str) -> bool:
        if name not in self.rules and name not in self.open:
            self.open.add(name)
            if self.node(self._bodies[name]):
                self.rules.add(name)
        return name in self.rules

    def node(self, node: Node) -> bool:
        if type(node) is nodes.Rule:
            return node.name in self.rules or self.rule(node.name)
        if isinstance(node, _COMPOSED):
            if id(node) not in self._nodes and self._composed(node):
                self._nodes.add(id(node))
            return id(node) in self._nodes
        if type(node) is nodes.CharSet:
            return any(low < 0xD800 or high > 0xDFFF for low, high in node.ranges)
        return not (isinstance(node, nodes.Automaton) and node.is_nothing)

    def _composed(self, node: nodes.Concat | nodes.Alternation | nodes.Repeat | nodes.Graph) -> bool:
        match node:
            case nodes.Concat(items):
                return all(map(self.node, items))
            case nodes.Alternation(items):
                return any(map(self.node, items))
            case nodes.Repeat(item, least, _):
                return not least or self.node(item)
            case nodes.Graph(rows, accepting):
                reached, work = {0}, [0]
                while work and accepting.isdisjoint(reached):
                    for item, target in rows[work.pop()]:
                        if target not in reached and self.node(item):
                            reached.add(target)
                            work.append(target)
                return not accepting.isdisjoint(reached)
