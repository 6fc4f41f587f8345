"""The language of replies in DSPy's chat format: forced headers, and a typed value under each.

A `Scaffold` is plain data. The extensions of an lm15 request carry it as JSON text, so that DSPy's cache, retries and
history contain it; the engine lowers it to one regular language.
"""

from __future__ import annotations

import datetime
import enum
import inspect
import json
import types
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

import dspy
from graftlm.adapters.dspy.decisions import Decision, decision_form
from graftlm.adapters.dspy.pieces import joined, literal, lower_schema
from graftlm.core.errors import GrammarError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.python_types.pydantic_schema import schema_of
from graftlm.core.grammar.python_types.range_patterns import INTEGER, NUMBER
from graftlm.core.grammar.regex import parser
from graftlm.core.grammar.schema.lowering import Lowered
from graftlm.core.grammar.spec import Composite, JsonSchema

Kind = Literal["text", "regex", "choices", "schema", "decision"]

_MONTH_AND_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = r"(([0-9]{2}(0[48]|[2468][048]|[13579][26]))|(([02468][048]|[13579][26])00))"
DATE = rf"([0-9]{{3}}[1-9]|[0-9]{{2}}[1-9][0-9]|[0-9][1-9][0-9]{{2}}|[1-9][0-9]{{3}})-{_MONTH_AND_DAY}"
"""The pattern of a calendar date from the year 1 on, without February 29."""

_END = "[[ ## completed ## ]]\n"


@dataclass(frozen=True)
class Field:
    """One output field. `value` is a pattern, the options, a schema or a bound in characters, by `kind`."""

    name: str
    kind: Kind
    value: Any = None

    @property
    def header(self) -> str:
        return f"[[ ## {self.name} ## ]]\n"

    def piece(self) -> Lowered | Decision:
        """Return the field's value: a language, or a decision to measure."""
        match self.kind:
            case "text":
                return Lowered(text_value(self.value), {})
            case "regex":
                return Lowered(parser.parse(self.value), {})
            case "choices":
                return Lowered(nodes.alternation(*(nodes.literal(option) for option in self.value)), {})
            case "decision":
                form, labels = self.value
                return Decision(self.name, tuple(labels), form)
            case "schema":
                return lower_schema(self.value)


@dataclass(frozen=True, eq=False)
class Scaffold:
    """The output fields of a signature, in the order of the reply."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, signature: type[dspy.Signature], calls: dict[str, Any] | None = None) -> Scaffold:
        """Read a signature. A field whose type has no grammar becomes text, with a warning that names it.

        calls  the schema of fields of type `dspy.ToolCalls`; None: the type's own schema, with any names and arguments.
        """
        return cls(tuple(_field(name, info, calls) for name, info in signature.output_fields.items()))

    def to_json(self) -> str:
        return json.dumps([[f.name, f.kind, f.value] for f in self.fields], ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> Scaffold:
        return Scaffold(tuple(Field(*entry) for entry in json.loads(text)))

    @property
    def measured(self) -> bool:
        """True if a field's probabilities are measured, so that the reply consists of several pieces."""
        return any(field.kind == "decision" for field in self.fields)

    def pieces(self) -> list[Lowered | Decision]:
        """Return the pieces of the reply, from its first header to its last line."""
        pieces: list[Lowered | Decision] = []
        for i, field in enumerate(self.fields):
            pieces += [literal(("\n\n" if i else "") + field.header), field.piece()]
        return [*pieces, literal("\n\n" + _END)]

    @property
    def choices(self) -> dict[str, list[str]]:
        """The options of each field with at least two, by its header."""
        return {field.header: field.value for field in self.fields if field.kind == "choices" and len(field.value) > 1}

    @cached_property
    def links(self) -> list[Composite]:
        """The languages of a reply, in order; decisions, which have no language, are not included."""
        return joined([piece for piece in self.pieces() if isinstance(piece, Lowered)])

    @property
    def separate_links(self) -> list[Composite | JsonSchema]:
        """The languages of a reply with each schema separate: one too large for an automaton is compiled alone."""
        return _separate(self.pieces(), self.fields)


def _separate(pieces: list[Lowered | Decision], fields: tuple[Field, ...]) -> list[Composite | JsonSchema]:
    """Return the pieces of a scaffold with each schema separate."""
    links: list[Composite | JsonSchema] = []
    run: list[Lowered] = []
    schemas = {2 * i + 1: JsonSchema(field.value) for i, field in enumerate(fields) if field.kind == "schema"}
    for i, piece in enumerate(pieces):
        if i in schemas:
            links += [*joined(run), schemas[i]]
            run = []
        elif isinstance(piece, Lowered):
            run.append(piece)
    return [*links, *joined(run)]


def text_value(max_chars: int | None = None) -> nodes.Node:
    """Return the language of texts without "[[ ##", the beginning of a header.

    The parser of a reply would cut a value at a header, and the automaton needs the end of the value. With
    `max_chars` a text has at most that many characters; brackets count together with the character after them.
    """
    # The automaton that searches for "[[ ##", as an expression. Behind one bracket, `again` leads through more of the
    # header to one bracket again, and `leave` to a character that the header does not go on with.
    brackets = nodes.plus(nodes.literal("["))
    space = nodes.concat(brackets, nodes.literal(" "))
    again = nodes.concat(space, nodes.optional(nodes.literal("#")), nodes.literal("["))
    leave = nodes.alternation(
        nodes.not_chars("["),
        nodes.concat(brackets, nodes.not_chars("[ ")),
        nodes.concat(space, nodes.not_chars("#[")),
        nodes.concat(space, nodes.literal("#"), nodes.not_chars("#[")),
    )
    step = nodes.alternation(nodes.not_chars("["), nodes.concat(nodes.literal("["), nodes.star(again), leave))
    return nodes.repeat(step, 0, max_chars)


def _field(name: str, info: FieldInfo, calls: dict[str, Any] | None) -> Field:
    annotation = info.annotation
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if annotation is str or _is_text_type(annotation) or _is_text_union(annotation):
        left_out = [keyword for keyword in ("pattern", "min_length") if _bound(info, keyword) is not None]
        if left_out:
            _warn(name, annotation, f"it is free text, which does not keep {' and '.join(left_out)}; check the value")
        longest = _bound(info, "max_length")
        return Field(name, "text", None if longest is None else int(longest))
    if annotation is bool:
        return Field(name, "choices", ["True", "False"])
    if isinstance(annotation, enum.EnumMeta):
        return Field(name, "choices", [_enum_text(member) for member in annotation])
    if get_origin(annotation) is Literal:
        return Field(name, "choices", list(dict.fromkeys(str(option) for option in get_args(annotation))))
    if (decision := decision_form(annotation)) is not None:
        return Field(name, "decision", decision)
    if not info.metadata and annotation in _PATTERNS:
        return Field(name, "regex", _PATTERNS[annotation])
    if calls is not None and annotation is dspy.ToolCalls:
        try:
            return _kept(name, annotation, calls)
        except GrammarError as error:
            _warn(name, annotation, f"it may call what is no tool, for no grammar keeps their arguments: {error}")
    return _schema_field(name, annotation, info)


_PATTERNS: dict[Any, str] = {int: INTEGER, float: NUMBER, datetime.date: DATE}


def _schema_field(name: str, annotation: Any, info: FieldInfo) -> Field:
    constrained: Any = Annotated[annotation, *info.metadata] if info.metadata else annotation
    try:
        return _kept(name, annotation, schema_of(constrained))
    except (PydanticUserError, GrammarError) as error:
        _warn(name, annotation, f"no grammar describes it, so its value is text and may fail to parse: {error}")
        return Field(name, "text")


def _kept(name: str, annotation: Any, schema: dict[str, Any]) -> Field:
    """Return a field of this schema, with a warning that names the dropped keywords."""
    if issues := lower_schema(schema).issues:
        what = "; ".join(map(str, issues))
        _warn(name, annotation, f"its grammar leaves out {what}; DSPy checks that after the reply")
    return Field(name, "schema", schema)


def _warn(name: str, annotation: Any, what: str) -> None:
    kind = getattr(annotation, "__name__", None) or str(annotation)
    warnings.warn(f"output field {name!r} is a {kind}: {what}", UserWarning, stacklevel=2)


def _is_text_type(annotation: Any) -> bool:
    """Return True for types that DSPy reads from plain text: reasoning and code."""
    return inspect.isclass(annotation) and issubclass(annotation, dspy.Reasoning | dspy.Code)


def _is_text_union(annotation: Any) -> bool:
    """Return True for unions with `str`, such as `str | None`, whose text DSPy uses unchanged."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return is_union and str in get_args(annotation) and type(None) in get_args(annotation)


def _enum_text(member: enum.Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name


def _bound(info: FieldInfo, attribute: str) -> Any:
    found = [getattr(item, attribute) for item in info.metadata if getattr(item, attribute, None) is not None]
    return found[0] if found else None
