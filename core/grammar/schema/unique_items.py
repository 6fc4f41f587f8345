"""`uniqueItems`, and names that `minProperties` counts: which arrays and objects of a text they apply to.

A regular or context-free language cannot keep items apart, so engines/unique.py masks each token that would complete a
second equal item. No item may come to where only an equal one is left. So scalars, and containers of scalars, are
written in one spelling and compared as texts; containers of which an unequal one can always be completed, by one more
item or member, are compared by value. For any other item `uniqueItems` is refused, or goes by `on_unsupported`. 7 of
566 public schemas of MaskBench have the keyword, a fifth of SchemaStore's; a schema without it pays for one search of
its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products.product import without_products
from graftlm.core.grammar.schema.algebra import text_language
from graftlm.core.grammar.schema.algebra.kinds import KINDS
from graftlm.core.grammar.schema.algebra.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Both,
    ExactlyOne,
    Implied,
    Literals,
    Not,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
    both,
    item_at,
    union,
)
from graftlm.core.grammar.schema.text.items import merged
from graftlm.core.grammar.spec import JsonSchema, Limits

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.nodes.nodes import Node
    from graftlm.core.grammar.schema.algebra.shape_algebra import ShapeAlgebra
    from graftlm.core.grammar.schema.reading.json_schema import SchemaReader

Close = Callable[[tuple[Shape, ...]], tuple[Shape, ...]]

_MAX_DEPTH = 8
"""Containers inside an item that are written in one spelling."""
_ITEM_STATES = 2_000
_MAX_PLACES = 5_000


_SEVERAL = re.compile(r'"minProperties":(?![01][,}])')
_STANDARD = re.compile(r'"(?:\$ref|\$dynamicRef|\$id|id)":"https?://json-schema\.org/')
"""A reference to a metaschema, which has `uniqueItems` and is no part of the schema's text."""


def may_have_unique_parts(spec: JsonSchema) -> bool:
    """Return False if the text of the schema shows that no items and no names of members must differ."""
    text = spec.text + spec.documents_text
    if '"uniqueItems":true' in text or '"not":' in text and '"maxProperties":' in text:
        return True
    counts = '"minProperties":' in text and _SEVERAL.search(text) is not None
    return counts or "json-schema.org/" in text and _STANDARD.search(text) is not None


def has_free_names(parts: Iterable[Shape]) -> bool:
    """Return True if objects of all these shapes have names without end, or only names that one of them lists."""
    return all(
        part.names is None and (part.additional != NOTHING or not part.patterns)
        for part in parts
        if isinstance(part, Object)
    )


@dataclass(eq=False, slots=True)
class Place:
    """A value of a text below which items or names must differ.

    unique    items of an array here must differ
    by_value  first bytes of items that are compared by value: there is always a way to make them unequal
    until     objects among these are compared by these members only; None: by all
    names     names of members of an object here must differ
    items, members, pattern, others  places of the values inside; None where nothing must differ
    """

    unique: bool = False
    by_value: bytes = b""
    until: tuple[str, ...] | None = None
    names: bool = False
    items: Place | None = None
    members: dict[str, Place | None] = field(default_factory=dict)
    pattern: tuple[str, Place | None] | None = None
    others: Place | None = None

    def member(self, name: str) -> Place | None:
        """Return the place of the value of member `name`."""
        if name in self.members:
            return self.members[name]
        if self.pattern is not None and text_language.contains(self.pattern[0], name):
            return self.pattern[1]
        return self.others


def places_of(reader: SchemaReader, close: Close) -> Place | None:
    """Return the place of the whole text; None if nothing in it must differ.

    close  closes objects as strict mode does

    Raises GrammarError, or adds an issue to `reader`, for each `uniqueItems` that a mask cannot keep.
    """
    places = _Places(reader, close)
    root = places.of([Reference("")])
    return root if places.any_kept else None


class _Places:
    """Builds the places of one schema, each set of alternative shapes once."""

    def __init__(self, reader: SchemaReader, close: Close) -> None:
        self._reader = reader
        self._algebra = reader.algebra
        self._close = close
        self._found: dict[frozenset[Shape], Place] = {}
        self._reached: dict[Shape, bool] = {}

    @property
    def any_kept(self) -> bool:
        return any(place.unique or place.names for place in self._found.values())

    def of(self, shapes: Iterable[Shape]) -> Place | None:
        alternatives = frozenset(shapes) - {NOTHING}
        if not any(map(self._reaches, alternatives)):
            return None
        found = self._found.get(alternatives)
        if found is None:
            if len(self._found) >= _MAX_PLACES:
                raise GrammarError(
                    f"uniqueItems stands at more than {_MAX_PLACES:,} places of a text; remove it from alternatives"
                )
            found = self._found[alternatives] = Place()
            self._look_at_arrays(found, alternatives)
            self._look_at_objects(found, alternatives)
        return found

    def _look_at_arrays(self, place: Place, alternatives: frozenset[Shape]) -> None:
        cases = self._cases(alternatives, "array")
        arrays = [[part for part in case if isinstance(part, Array)] for case in cases]
        unique = [part for case in arrays for part in case if part.unique]
        if unique:
            spelling = OneSpelling(self._algebra, self._close, self._reader.options.whitespace == "flexible")
            reason = next((reason for case in cases if (reason := self._reason(case, spelling))), None)
            place.unique, place.by_value, place.until = reason is None, spelling.by_value, spelling.until
            for part in dict.fromkeys(unique) if reason else ():
                self._reader.refuse(self._reader.pointers.get(part, ""), "uniqueItems", f"cannot be kept {reason}")
        for wanted in {wanted.shape for case in arrays for part in case for wanted in part.contains}:
            if self._reaches(wanted):
                self._refuse_all(wanted, "in what 'contains' asks for")
        longest = max((len(part.prefix) for case in arrays for part in case), default=0)
        place.items = self.of(both(*(item_at(part, i) for part in case)) for case in arrays for i in range(longest + 1))

    def _reason(self, case: tuple[Shape, ...], spelling: OneSpelling) -> str | None:
        """Return why the items of arrays of these shapes cannot be kept apart.

        An array that one alternative wants unique has unique items under every alternative of its place.
        """
        arrays = [part for part in case if isinstance(part, Array)]
        whole = merged(arrays or [Array()])
        if len(arrays) < len(case):
            return "beside 'not', 'if' or an alternative that excludes others"
        if whole.prefix or whole.contains:
            return "beside 'prefixItems' or 'contains'"
        if spelling.of(whole.items) is None:
            return "over items that may be written in several ways, as objects and numbers inside them"
        if whole.min_items > 1 and not whole.unique and not spelling.by_value:
            return "where another alternative asks for several items without it"
        return None

    def _refuse_all(self, shape: Shape, reason: str) -> None:
        for part in _below(shape, self._algebra.resolve):
            if isinstance(part, Array) and part.unique:
                self._reader.refuse(self._reader.pointers.get(part, ""), "uniqueItems", f"cannot be kept {reason}")

    def _look_at_objects(self, place: Place, alternatives: frozenset[Shape]) -> None:
        cases = [
            [part for part in self._close(case) if isinstance(part, Object)]
            for case in self._cases(alternatives, "object")
        ]
        place.names = any(part.counts_names for case in cases for part in case)
        listed = dict.fromkeys(name for case in cases for part in case for name in part.listed)
        for name in listed:
            place.members[name] = self.of(both(*(self._algebra.member(part, name) for part in case)) for case in cases)
        place.others = self.of(both(*(part.additional for part in case)) for case in cases)
        patterns = {pattern for case in cases for part in case for pattern, _ in part.patterns}
        for pattern in patterns:
            fitting = [both(*(dict(part.patterns).get(pattern, part.additional) for part in case)) for case in cases]
            found = self.of(fitting)
            if len(patterns) == 1:
                place.pattern = (pattern, found)
            elif found is not None:
                for shape in fitting:
                    self._refuse_all(shape, "in one of several 'patternProperties'")

    def _cases(self, alternatives: frozenset[Shape], kind: str) -> list[tuple[Shape, ...]]:
        found: list[tuple[Shape, ...]] = []
        for shape in alternatives:
            cases = self._algebra.cases.of(self._algebra.narrow(shape, kind))
            if cases is None:
                self._refuse_all(shape, "in so many alternatives")
            found += cases or ()
        return found

    def _reaches(self, shape: Shape) -> bool:
        """Return True if an array with unique items or an object that counts names stands in `shape`."""
        if shape not in self._reached:
            seen: list[Shape] = []
            for part in _below(shape, self._algebra.resolve):
                if self._reached.get(part) or _must_differ(part):
                    self._reached[shape] = True
                    return True
                seen.append(part)
            self._reached.update(dict.fromkeys(seen, False))
        return self._reached[shape]


def _must_differ(shape: Shape) -> bool:
    return isinstance(shape, Array) and shape.unique or isinstance(shape, Object) and shape.counts_names


def _below(shape: Shape, resolve: Callable[[str], Shape]) -> Iterator[Shape]:
    """Yield `shape` and each shape in it once, those that it refers to as well."""
    work, seen = [shape], {shape}
    while work:
        part = work.pop()
        yield part
        inner: tuple[Shape, ...] = ()
        match part:
            case Union(parts) | Both(parts) | ExactlyOne(parts):
                inner = parts
            case Implied(below) | Not(below):
                inner = (below,)
            case Reference(target):
                inner = (resolve(target),)
            case Array():
                inner = (*part.prefix, part.items, *(wanted.shape for wanted in part.contains))
            case Object():
                inner = (*(item for _, item in (*part.properties, *part.patterns)), part.additional)
        work += [below for below in inner if below not in seen]
        seen.update(inner)


class OneSpelling:
    """Restricts the shape of an item to one spelling per value, but for containers that are compared by value.

    flexible   blanks may stand between the tokens of a container
    by_value   first bytes of containers of which an unequal one can always be completed
    by_text    first bytes of the other containers
    until      where these are closed objects: the names up to the pivot, the last member that can be made unequal
    """

    def __init__(self, algebra: ShapeAlgebra, close: Close, flexible: bool) -> None:
        self._algebra = algebra
        self._close = close
        self._flexible = flexible
        self.by_value = self.by_text = b""
        self.until: tuple[str, ...] | None = None

    def of(self, shape: Shape) -> Shape | None:
        """Return the restricted shape; None if the item may have several spellings, or items before it differ."""
        try:
            found = self._of(shape, 0)
        except GrammarError:
            return None
        return None if set(self.by_value) & set(self.by_text) else found

    def _of(self, shape: Shape, depth: int) -> Shape | None:
        if depth > _MAX_DEPTH:
            return None
        algebra = self._algebra
        found: list[Shape | None] = [
            Literals((kind,)) for kind in ("null", "true", "false") if algebra.narrow(shape, kind) == ANYTHING
        ]
        for piece in algebra.pieces(shape, "string"):
            if isinstance(piece, Text) and piece == Text(piece.min_length, piece.max_length):
                piece = replace(piece, patterns=(text_language.ONE_SPELLING,))
            found.append(piece)
        for number in algebra.pieces(shape, "number"):
            if isinstance(number, Number):
                found.append(replace(number, one_spelling=not number.integer))
            elif isinstance(number, Literals):
                found.append(_one_literals(number.texts))
        found += self._containers(shape, depth)
        kept = [part for part in found if part is not None]
        return union(*kept) if len(kept) == len(found) else None

    def _containers(self, shape: Shape, depth: int) -> Iterator[Shape | None]:
        for kind in ("array", "object"):
            narrowed = self._algebra.narrow(shape, kind)
            if narrowed == NOTHING:
                continue
            cases = self._algebra.cases.of(narrowed)
            cases = None if cases is None else [self._close(case) for case in cases]
            first = b"[" if kind == "array" else b"{"
            is_endless, until = (False, None) if depth or self._flexible or not cases else self._is_endless(cases, kind)
            if is_endless and (first not in self.by_value or kind == "array" or until == self.until):
                self.by_value += first
                self.until = until if kind == "object" else self.until
                whole = Array() if kind == "array" else Object()  # what is not one shape of a kind may be of another
                yield narrowed if isinstance(narrowed, type(whole)) else both(whole, narrowed)
            elif self._flexible or cases is None or kind == "object" and not _in_one_order(cases):
                yield None
            else:
                self.by_text += b"" if depth else first
                yield from (self._container(case[0], depth) if len(case) == 1 else None for case in cases)

    def _is_endless(self, cases: list[tuple[Shape, ...]], kind: str) -> tuple[bool, tuple[str, ...] | None]:
        """Return True if an unequal value can be completed wherever the text of one of these containers has come to,
        by one more item or member, or in a closed object by another value of its pivot, and the names up to that.
        """
        if all(all(map(self._can_grow, case)) for case in cases):
            return True, None
        shapes = dict.fromkeys(part.shape if isinstance(part, Not) else part for case in cases for part in case)
        closed, *more = [part for part in shapes if not self._can_grow(part)] or [NOTHING]
        if kind == "array" or more or not isinstance(closed, Object) or closed.max_properties is not None:
            return False, None
        if closed.additional != NOTHING or closed.patterns or closed.names is not None:
            return False, None
        others = [part for part in shapes if isinstance(part, Object) and part is not closed]
        if any(part.min_properties for part in others):
            return False, None
        names = [name for name, _ in closed.properties]
        excluded = {name for case in cases for part in case if isinstance(part, Not) for name in _required(part.shape)}
        endless = [
            name
            for name, item in closed.properties
            if self._is_endless_value(item)
            and name not in excluded
            and all(self._algebra.member(part, name) == ANYTHING for part in others)
        ]
        until = tuple(names[: names.index(endless[-1]) + 1]) if endless else None
        return bool(endless) and all(closed in case for case in cases), until

    def _can_grow(self, part: Shape) -> bool:
        match part:
            case Array():
                is_plain = not part.contains and part.max_items is None and not self._algebra.is_nothing(part.items)
                return is_plain and (not part.unique or self._is_endless_value(part.items))
            case Not(Object() as inner):  # may lack names, or values of names, whatever other members there are
                return inner == Object(inner.properties, required=inner.required, closed=inner.closed)
            case Object():
                is_open = part.names is None and part.max_properties is None and part.additional != NOTHING
                return (
                    is_open
                    and not any(self._algebra.is_nothing(item) for _, item in part.patterns)
                    and (not self._algebra.is_nothing(part.additional))
                )
            case _:
                return False

    def _is_endless_value(self, shape: Shape) -> bool:
        """Return True if an unequal value can be completed wherever the text of one has come to."""
        kinds = [kind for kind in KINDS if self._algebra.narrow(shape, kind) != NOTHING]
        if kinds == ["string"]:
            return all(
                isinstance(piece, Text) and piece.max_length is None and _is_endless_text(text_language.quoted(piece))
                for piece in self._algebra.pieces(shape, "string")
            )
        if kinds not in (["array"], ["object"]):
            return False
        cases = self._algebra.cases.of(self._algebra.narrow(shape, kinds[0]))
        return cases is not None and all(all(map(self._can_grow, self._close(case))) for case in cases)

    def _container(self, shape: Shape, depth: int) -> Shape | None:
        match shape:
            case Array() if not shape.unique and not shape.contains:
                inner = [self._of(item, depth + 1) for item in (*shape.prefix, shape.items)]
                kept = [item for item in inner if item is not None]
                if len(kept) < len(inner):
                    return None
                return replace(shape, prefix=tuple(kept[:-1]), items=kept[-1])
            case Object() if shape.additional == NOTHING and not shape.patterns and shape.names is None:
                members = [(name, self._of(item, depth + 1)) for name, item in shape.properties]
                found = tuple((name, item) for name, item in members if item is not None)
                return replace(shape, properties=found) if len(found) == len(members) else None
            case _:
                return None


def _required(shape: Shape) -> tuple[str, ...]:
    return shape.required if isinstance(shape, Object) else ()


def _in_one_order(cases: list[tuple[Shape, ...]]) -> bool:
    """Return True if no two objects of these shapes write members of the same names in different orders."""
    orders = [[name for part in case if isinstance(part, Object) for name, _ in part.properties] for case in cases]
    return all(
        [name for name in one if name in other] == [name for name in other if name in one]
        for one, other in combinations(orders, 2)
    )


def _one_literals(texts: Iterable[str]) -> Literals:
    """The constants of `texts` without those that equal one before, whole numbers without a fraction."""
    return Literals(tuple({canonical(text): _written(json.loads(text)) for text in reversed(list(texts))}.values()))


def _written(value: Any) -> str:
    return json.dumps(_with_whole_numbers(value), ensure_ascii=False, separators=(",", ":"))


def _with_whole_numbers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_whole_numbers(item) for item in value]
        case dict():
            return {name: _with_whole_numbers(item) for name, item in value.items()}
        case _:
            return value


def canonical(text: str | bytes, until: tuple[str, ...] | None = None) -> str:
    """Return a text that is equal for JSON texts of equal values: 1 and 1.0, members in any order.

    until  the members of an object that are compared; None: all
    """
    try:
        value = _with_whole_numbers(json.loads(text))
    except (RecursionError, ValueError):  # nested too deep for Python, or with a number of thousands of digits
        return text if isinstance(text, str) else text.decode()
    if until is not None and isinstance(value, dict):
        value = {name: item for name, item in value.items() if name in until}
    return json.dumps(value, sort_keys=True)


def num_texts(node: Node) -> float:
    """Return the number of texts of a regular language, infinity if there is no end or the language is large."""
    dfa, counts = _continuations(node)
    return np.inf if dfa is None else float(counts[dfa.start[0]])


def _is_endless_text(node: Node) -> bool:
    """Return True if each prefix of a text of this regular language has infinitely many continuations."""
    dfa, counts = _continuations(node)
    return dfa is not None and bool(np.isinf(counts[1:][~dfa.accepting[1:]]).all())


def _continuations(node: Node) -> tuple[Dfa | None, npt.NDArray[np.float64]]:
    """Return the DFA of `node` and the number of continuations of each state; no DFA if it has too many states."""
    try:
        dfa = Dfa.compile(without_products(node), Limits(states=_ITEM_STATES, seconds=1.0), counters=False)
    except GrammarError:
        return None, np.zeros(0)
    sizes = np.bincount(dfa.classes, minlength=dfa.table.shape[1])
    known = np.arange(dfa.num_states) == 0
    counts = np.zeros(dfa.num_states)
    with np.errstate(over="ignore"):
        while (ready := known[dfa.table].all(axis=1) & ~known).any():
            counts[ready] = dfa.accepting[ready] + (counts[dfa.table[ready]] * sizes).sum(axis=1)
            known |= ready
    counts[~known] = np.inf
    return dfa, counts
