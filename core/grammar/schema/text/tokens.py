"""The tokens of JSON: brackets, commas, names and literals."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property, lru_cache
from typing import Any

from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import EMPTY, NOTHING, Node
from graftlm.core.grammar.schema.algebra.shapes import Number, Text
from graftlm.core.grammar.schema.text import json_text
from graftlm.core.grammar.schema.text.name_trie import names_but
from graftlm.core.grammar.spec import JsonSchema, Options

_Edge = tuple[Node, int]

_BLANKS = nodes.repeat(nodes.chars(" \t\n\r"), 0, 20)


class JsonTokens:
    """Writes the tokens of one document with the whitespace that was asked for.

    prefix  of the names of its rules, which tells schemas and options apart
    """

    def __init__(self, spec: JsonSchema, options: Options) -> None:
        self._spec, self._options = spec, options
        self._blanks = _BLANKS if options.whitespace == "flexible" else EMPTY
        after = nodes.literal(" ") if options.whitespace == "single" else self._blanks
        self._names: dict[str, Node] = {}
        self._other_names: dict[frozenset[str], Node] = {}
        self._brackets: dict[str, tuple[Node, Node]] = {}  # by the opening one, with the closing one
        self.comma = nodes.concat(self._blanks, nodes.literal(","), after)
        self._colon = nodes.concat(self._blanks, nodes.literal(":"), after)
        self._starts: tuple[_Edge, ...] = ()
        self._passed: list[tuple[_Edge, ...]] = []

    @cached_property
    def prefix(self) -> str:
        text, options = self._spec.text + self._spec.documents_text, self._options
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        prefix = f"{digest} {options.whitespace} {'strict' if options.strict else 'open'}"
        return prefix + (" bounded" if options.bounded_numbers else "")

    @staticmethod
    def of_shape(shape: Text | Number, node: Node) -> Node:
        """Return `node`, the strings of `shape`; of a common shape its automaton, which is cached."""
        return _automaton_of(node) if _is_common(shape) else node

    def literal(self, value: Any) -> Node:
        match value:
            case list():
                return self.bracketed("[", self._joined([self.literal(item) for item in value]), "]")
            case dict():
                pairs = [nodes.concat(self.name(name), self.literal(item)) for name, item in value.items()]
                return self.bracketed("{", self._joined(pairs), "}")
            case _:
                return self.scalar(value)

    @staticmethod
    def scalar(value: Any) -> Node:
        match value:
            case str():
                return json_text.string(value)
            case float() if value.is_integer():  # 2.0 is the integer 2 as well
                return nodes.alternation(nodes.literal(json.dumps(value)), nodes.literal(str(int(value))))
            case _:
                return nodes.literal(json.dumps(value))

    @staticmethod
    def scalar_text(text: str) -> Node:
        """The same of a value by its JSON text, which is how a string is written."""
        return json_text.written(text) if text[0] == '"' else JsonTokens.scalar(json.loads(text))

    def _joined(self, items: list[Node]) -> Node:
        return nodes.concat(*[part for item in items for part in (self.comma, item)][1:])

    def name(self, name: str) -> Node:
        """The name of a member and the colon."""
        found = self._names.get(name)
        if found is None:
            text = json_text.string_bytes(name)
            found = self._names[name] = nodes.concat(nodes.Literal(text), self._colon)
        return found

    def key(self, name: Node) -> Node:
        """The same of any name in `name`, a language of names as they are written."""
        return nodes.concat(json_text.quoted(name), self._colon)

    def other_names(self, names: list[str]) -> Node:
        """Any name but these, as it is written: the same node in whatever order they come."""
        key = frozenset(names)
        found = self._other_names.get(key)
        if found is None:
            found = self._other_names[key] = self._names_but(names)
        return found

    def _names_but(self, names: list[str]) -> Node:
        if not names:
            return json_text.other_names(names)
        # a difference takes one spelling of each name away
        one_spelling = all(name.isprintable() and "/" not in name for name in names)
        anything = nodes.star(json_text.TEXT_CHAR if one_spelling else json_text.NAME_CHAR)
        return names_but(names).with_source(
            nodes.Difference(anything, nodes.alternation(*map(json_text.inside, names)))
        )

    def starts_and_passed(self, count: int) -> tuple[tuple[_Edge, ...], list[tuple[_Edge, ...]]]:
        """Edges of a walk over `count` members or more that may each be left out: state 0 has written nothing,
        2 i + 1 is about to write member i, 2 i + 2 has passed it.

        -> those of state 0; those of each state that has passed a member
        """
        if len(self._passed) < count:
            range_of = range(len(self._passed), count)
            self._starts += tuple([(EMPTY, 2 * i + 1) for i in range_of])
            self._passed += [((self.comma, 2 * i + 3), (EMPTY, 2 * i + 4)) for i in range_of]
        return self._starts, self._passed

    def bracketed(self, left: str, inside: Node, right: str) -> Node:
        if nodes.is_nothing(inside):
            return NOTHING
        marks = self._brackets.get(left)
        if marks is None:
            opening = nodes.concat(nodes.literal(left), self._blanks)
            marks = self._brackets[left] = opening, nodes.concat(self._blanks, nodes.literal(right))
        return nodes.concat(marks[0], inside, marks[1])


def _is_common(shape: Text | Number) -> bool:
    """Whether many schemas have this shape: of texts, at most one format; of numbers, no bounds."""
    if isinstance(shape, Number):
        return shape == Number(integer=shape.integer)
    return shape == Text(formats=shape.formats[:1], min_length=min(shape.min_length, 1))


@lru_cache(maxsize=64)
def _automaton_of(node: Node) -> Node:
    """`node` as its automaton, unless that counts repeats: then it has few states only inside a larger one."""
    found = product.without_counters(node)
    return node if found is None else found.with_source(node)
