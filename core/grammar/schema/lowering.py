"""From shapes to the language of their JSON text.

The result is a node over bytes. Where a shape contains itself, or admits any value, it holds Rule nodes and comes with
the rules they name; without rules the language is regular.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import EMPTY, NOTHING, Node, Rule, Series
from graftlm.core.grammar.automata import product
from graftlm.core.grammar.schema import json_text, numbers, text_language
from graftlm.core.grammar.schema.json_schema import SchemaReader
from graftlm.core.grammar.schema.satisfiability import blame, unending
from graftlm.core.grammar.schema.shapes import (
    ANYTHING,
    NOTHING as NO_SHAPE,
    Anything,
    Array,
    Boolean,
    ExactlyOne,
    Literals,
    Null,
    Number,
    Object,
    Reference,
    Shape,
    Text,
    Union,
)
from graftlm.core.grammar.spec import Issue, JsonSchema, Options

MAX_PATTERNS = 4
MAX_SELECTIONS = 128
MAX_NODES = 50_000  # a definition that takes more when it is written out wherever it is used becomes a rule
_BLANKS = ast.repeat(ast.chars(" \t\n\r"), 0, 20)


@dataclass(frozen=True)
class Lowered:
    """A language and the rules that it refers to; `rules` is empty when it is regular.

    The names of rules tell schemas and options apart, so languages of several schemas can share one grammar.
    """

    node: Node
    rules: dict[str, Node]
    issues: tuple[Issue, ...] = ()
    annotations: tuple[Issue, ...] = ()


def lower_schema(spec: JsonSchema, options: Options, *, context_free: bool = False) -> Lowered:
    """The JSON text of the values that a schema admits, with rules where it must or `context_free` asks for them.

    Raises GrammarError for what cannot be kept or satisfied.
    """
    lowered = Lowering(spec, options, context_free=context_free).lower()
    if lowered.rules and not context_free:
        return Lowering(spec, options, context_free=True).lower()
    return lowered


class Lowering:
    """Lowers the shapes of one schema document.

    With `context_free` each token of JSON becomes a rule. A parser that reads tokens needs them whole and apart: were
    `{"a":` one of them, it would never see the `{` of `{"b":`.
    """

    def __init__(self, spec: JsonSchema, options: Options, *, context_free: bool = False) -> None:
        self._reader = SchemaReader(spec, options)
        self._algebra = self._reader.algebra
        self._strict = options.strict
        digest = hashlib.blake2b(
            (spec.text + spec.documents_text).encode(errors="surrogatepass"), digest_size=8
        ).hexdigest()
        self._prefix = f"{digest} {options.whitespace} {'strict' if options.strict else 'open'}"
        blanks = _BLANKS if options.whitespace == "flexible" else EMPTY
        after = ast.literal(" ") if options.whitespace == "single" else blanks
        self._context_free = context_free
        self._rules: dict[str, Node] = {}
        self._tokens: dict[Node, Node] = {}
        self._blanks = blanks
        self._comma = self._token(ast.concat(blanks, ast.literal(","), after))
        self._colon = ast.concat(blanks, ast.literal(":"), after)
        self._targets: dict[str, Node] = {}
        self._open: list[str] = []
        self._sizes: dict[int, tuple[Node, int]] = {}
        self._shapes: dict[Shape, Node] = {}

    def lower(self) -> Lowered:
        """The JSON text of the whole document. Raises GrammarError when no value satisfies it."""
        root = self._reader.shape("")
        if self._algebra.is_nothing(self._close(root)):
            pointer, reason = blame(root, "", self._algebra, self._close)
            raise GrammarError(f"{pointer or '/'}: nothing can satisfy this: {reason}", pointer=pointer)
        node = self._reference(Reference(""))
        for name in unending(self._rules):
            target = name.removeprefix(self._prefix).removeprefix(" ")
            raise GrammarError(
                f"{target or '/'}: nothing can satisfy this: the definition contains itself and has no way to end; "
                "make the inner reference optional or nullable",
                pointer=target,
            )
        return Lowered(node, self._rules, tuple(self._reader.issues), tuple(self._reader.annotations))

    def _token(self, node: Node) -> Node:
        """`node` as a rule of its own, in a context-free grammar."""
        if not self._context_free or node == NOTHING:
            return node
        if node not in self._tokens:
            rule = Rule(f"{self._prefix} token {len(self._tokens)}")
            self._rules[rule.name] = node
            self._tokens[node] = rule
        return self._tokens[node]

    def _value(self, shape: Shape) -> Node:
        if isinstance(shape, Reference):
            return self._reference(shape)
        if shape not in self._shapes:
            self._shapes[shape] = self._lower(self._close(shape))
        return self._shapes[shape]

    def _reference(self, shape: Reference) -> Node:
        target = shape.target
        if target in self._open:
            name = self._rule_name(target)
            self._rules.setdefault(name, NOTHING)  # marks it as one that contains itself; filled in when it is done
            return Rule(name)
        if target not in self._targets:
            self._open.append(target)
            try:
                node = self._value(self._reader.shape(target))
            finally:
                self._open.pop()
            name = self._rule_name(target)
            if self._context_free or name in self._rules or self._size(node) > MAX_NODES:
                self._rules[name] = node
                node = Rule(name)
            self._targets[target] = node
        return self._targets[target]

    def _rule_name(self, target: str) -> str:
        return f"{self._prefix} {target}"

    def _size(self, node: Node) -> int:
        """How many nodes there are below `node`, shared ones counted each time."""
        key = id(node)
        if key not in self._sizes:
            match node:
                case ast.Concat(items) | ast.Alternation(items):
                    size = 1 + sum(map(self._size, items))
                case ast.Repeat(item, _, _):
                    size = 1 + self._size(item)
                case Series(items, separator):
                    size = 1 + sum(self._size(item) + self._size(separator) for item, _ in items)
                case _:
                    size = 1
            self._sizes[key] = (node, size)  # with the node, so that its id stays its own
        return self._sizes[key][1]

    def _close(self, shape: Shape) -> Shape:
        """Strict mode: an object that declares members and says nothing of others has no others."""
        if self._strict and isinstance(shape, Object) and not shape.closed and (shape.properties or shape.patterns):
            return replace(shape, additional=NO_SHAPE, closed=True)
        if isinstance(shape, Union):
            return Union(tuple(map(self._close, shape.alternatives)))
        return shape

    def _lower(self, shape: Shape) -> Node:
        match shape:
            case Anything():
                return self._any_value()
            case Union(alternatives):
                return ast.alternation(*map(self._value, alternatives))
            case ExactlyOne():
                return self._exactly_one(shape)
            case Literals(texts):
                return ast.alternation(*(self._literal(json.loads(text)) for text in texts))
            case Null():
                return self._token(ast.literal("null"))
            case Boolean():
                return self._token(ast.alternation(ast.literal("true"), ast.literal("false")))
            case Number():
                return self._token(numbers.number(shape))
            case Text():
                return self._token(json_text.quoted(text_language.node(shape)))
            case Array():
                return self._array(shape)
            case Object():
                return self._object(shape)
            case Reference():
                return self._reference(shape)

    def _literal(self, value: Any) -> Node:
        match value:
            case list():
                return self._bracketed("[", self._joined([self._literal(item) for item in value]), "]")
            case dict():
                pairs = [ast.concat(self._name(name), self._literal(item)) for name, item in value.items()]
                return self._bracketed("{", self._joined(pairs), "}")
            case str():
                return self._token(json_text.string(value))
            case float() if value.is_integer():  # 2.0 is the integer 2 as well
                return self._token(ast.alternation(ast.literal(json.dumps(value)), ast.literal(str(int(value)))))
            case _:
                return self._token(ast.literal(json.dumps(value)))

    def _joined(self, items: list[Node]) -> Node:
        return ast.concat(*[part for item in items for part in (self._comma, item)][1:])

    def _name(self, name: str) -> Node:
        return self._token(ast.concat(json_text.string(name), self._colon))

    def _any_value(self) -> Node:
        name = f"{self._prefix} any value"
        if name not in self._rules:
            self._rules[name] = NOTHING
            scalars: tuple[Shape, ...] = (Text(), Number(), Boolean(), Null())
            self._rules[name] = ast.alternation(
                *map(self._value, scalars), self._array(Array()), self._object(Object())
            )
        return Rule(name)

    def _exactly_one(self, shape: ExactlyOne) -> Node:
        closed = [self._close(part) for part in shape.alternatives]
        for i, j in combinations(range(len(closed)), 2):
            if not (self._apart(closed[i], shape.excluded[j]) and self._apart(closed[j], shape.excluded[i])):
                parent, _, keyword = shape.pointer.rpartition("/")
                self._reader.refuse(
                    parent, keyword, f"a value may match both alternative {i} and {j} of oneOf; use anyOf, or give "
                    "each a required property with a different const",
                )  # fmt: skip
                break
        return ast.alternation(*map(self._value, shape.alternatives))

    def _apart(self, a: Shape, b: Shape) -> bool:
        try:
            return self._algebra.is_nothing(self._algebra.intersect(a, b))
        except GrammarError:
            return False

    def _array(self, shape: Array) -> Node:
        low, high, prefix = shape.min_items, shape.max_items, list(shape.prefix)
        if self._algebra.is_nothing(shape.items):
            high = len(prefix) if high is None else min(high, len(prefix))
        for i, item in enumerate(prefix):
            if self._algebra.is_nothing(item):
                high = i if high is None else min(high, i)
                break
        if high is not None:
            prefix = prefix[:high]
        if high is not None and low > high:
            return NOTHING
        tail: Node = EMPTY
        if high is None or high > len(prefix):
            most = None if high is None else high - len(prefix)
            rest = self._value(shape.items)
            if not prefix:
                return self._bracketed("[", ast.separated(rest, self._comma, low, high), "]")
            tail = ast.repeat(ast.concat(self._comma, rest), max(low - len(prefix), 0), most)
        for i in range(len(prefix) - 1, -1, -1):
            tail = ast.concat(*([self._comma] if i else []), self._value(prefix[i]), tail)
            if i >= low:
                tail = ast.optional(tail)
        return self._bracketed("[", tail, "]")

    def _object(self, shape: Object) -> Node:
        declared: list[tuple[str, bool, Node]] = []
        required = set(shape.required)
        names = list(dict.fromkeys([*(name for name, _ in shape.properties), *shape.required]))
        for name in names:
            member = self._algebra.member(shape, name)
            if self._algebra.is_nothing(member):
                if name in required:
                    return NOTHING
                continue
            pair = ast.concat(self._name(name), self._value(member))
            declared.append((name, name in required, pair))
        others = self._other_members(shape, names)
        return self._bracketed("{", self._members(shape, declared, others), "}")

    def _members(self, shape: Object, declared: list[tuple[str, bool, Node]], others: Node) -> Node:
        """Members in order, then any number of others, as many in all as the shape allows."""
        low, high = shape.min_properties, shape.max_properties
        pairs = [(pair, int(needed), 1) for _, needed, pair in declared]
        num_required = sum(needed for _, needed, _ in pairs)
        open_end = others != NOTHING
        if low <= num_required and (high is None or (not open_end and high >= len(pairs))):
            return self._series([*pairs, *([(others, 0, None)] if open_end else [])])
        if high is not None and high < max(num_required, low):
            return NOTHING
        if num_required == 0 and low == 1 and (high is None or (not open_end and high >= len(pairs))):
            return self._series([*pairs, *([(others, 0, None)] if open_end else [])], nonempty=True)
        if open_end and low > num_required + 1:
            # two members of one name count once, and nothing regular tells names apart
            message = f"minProperties {low} over names that the schema does not list cannot be kept"
            self._reader.refuse(shape.pointer, "minProperties", f"{message}; declare and require the properties")
            low = num_required
        return self._selections(shape, pairs, others, low)

    def _selections(self, shape: Object, pairs: list[tuple[Node, int, int]], others: Node, low: int) -> Node:
        """Each admissible choice of optional members on its own."""
        high = shape.max_properties
        num_required = sum(needed for _, needed, _ in pairs)
        num_optional = len(pairs) - num_required
        optional = [i for i, (_, needed, _) in enumerate(pairs) if not needed]
        if 2**num_optional > MAX_SELECTIONS:
            keyword = "minProperties" if high is None else "maxProperties"
            message = f"bounds on the number of properties with {num_optional} optional ones cannot be kept"
            self._reader.refuse(shape.pointer, keyword, f"{message}; require more of them or drop the bounds")
            return self._series([*pairs, *([(others, 0, None)] if others != NOTHING else [])])
        ways = []
        for size in range(num_optional + 1):
            count = num_required + size
            most = None if high is None else high - count
            least = max(low - count, 0)
            if (most is not None and most < 0) or (others == NOTHING and least > 0):
                continue
            for chosen in combinations(optional, size):
                items = [(pair, 1, 1) for i, (pair, needed, _) in enumerate(pairs) if needed or i in chosen]
                more = [] if others == NOTHING or most == 0 else [(others, least, most)]
                ways.append(self._series([*items, *more]))
        return ast.alternation(*ways)

    def _series(self, items: Iterable[tuple[Node, int, int | None]], nonempty: bool = False) -> Node:
        """Members with commas between, each as often as it says; plain concatenation once one must be there."""
        parts = list(items)
        first = next((i for i, (_, low, _) in enumerate(parts) if low), None)
        if first is None:
            if not parts:
                return NOTHING if nonempty else EMPTY
            if len(parts) == 1:
                return ast.separated(parts[0][0], self._comma, int(nonempty), parts[0][2])
            return Series(tuple((item, high is None) for item, _, high in parts), self._comma, nonempty)
        nodes = [ast.optional(ast.concat(item, self._comma)) for item, _, _ in parts[:first]]
        nodes.append(ast.separated(parts[first][0], self._comma, parts[first][1], parts[first][2]))
        nodes += [ast.repeat(ast.concat(self._comma, item), low, high) for item, low, high in parts[first + 1 :]]
        return ast.concat(*nodes)

    def _other_members(self, shape: Object, names: list[str]) -> Node:
        """One member whose name is not declared: each set of patterns that it may fit, or none of them."""
        if len(shape.patterns) > MAX_PATTERNS:
            message = f"{len(shape.patterns)} patterns in one object, the limit is {MAX_PATTERNS}"
            self._reader.refuse(shape.pointer, "patternProperties", f"{message}; join patterns with equal schemas")
            return NOTHING
        if not shape.patterns and self._algebra.is_nothing(shape.additional):
            return NOTHING
        free = json_text.other_names(names)
        spelled = [json_text.spell(text_language.pattern_node(pattern)) for pattern, _ in shape.patterns]
        ways = []
        for size in range(len(spelled), -1, -1):
            for chosen in combinations(range(len(spelled)), size):
                member: Shape = ANYTHING if chosen else shape.additional
                for i in chosen:
                    member = self._algebra.intersect(member, shape.patterns[i][1])
                if self._algebra.is_nothing(member):
                    continue
                inside = [spelled[i] for i in chosen] + ([free] if names or not chosen else [])
                name = self._restricted(inside, [s for i, s in enumerate(spelled) if i not in chosen], shape.names)
                if name != NOTHING:
                    key = self._token(ast.concat(json_text.quoted(name), self._colon))
                    ways.append(ast.concat(key, self._value(member)))
        return ast.alternation(*ways)

    def _restricted(self, inside: list[Node], outside: list[Node], names: Shape | None) -> Node:
        if names is not None:
            inside = [*inside, self._names(names)]
        node = inside[0] if len(inside) == 1 else ast.Intersection(tuple(inside))
        if outside:
            node = ast.Difference(node, ast.alternation(*outside))
        if isinstance(node, (ast.Intersection, ast.Difference)) and product.is_empty(node):
            return NOTHING
        return node

    def _names(self, shape: Shape) -> Node:
        """Names as they are written, one spelling each, without quotation marks."""
        match shape:
            case Union(alternatives):
                return ast.alternation(*map(self._names, alternatives))
            case Literals(texts):
                return ast.alternation(*(ast.literal(text[1:-1]) for text in texts))
            case Text(low, high, (), ()):
                return ast.repeat(json_text.NAME_CHAR, low, high)
            case Text():
                return text_language.node(shape)
            case Reference(target):
                return self._names(self._reader.shape(target))
            case _:
                raise AssertionError(f"{shape} is not a shape of names")

    def _bracketed(self, left: str, inside: Node, right: str) -> Node:
        if inside == NOTHING:
            return NOTHING
        opening = self._token(ast.concat(ast.literal(left), self._blanks))
        closing = self._token(ast.concat(self._blanks, ast.literal(right)))
        return ast.concat(opening, inside, closing)
