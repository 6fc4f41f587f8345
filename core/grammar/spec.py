"""Specs: the constraints that a user writes, checked where they are built and hashable as cache keys."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.collector import paused

if TYPE_CHECKING:
    from graftlm.core.grammar.nodes.nodes import Node

Whitespace = Literal["compact", "single", "flexible"]
OnUnsupported = Literal["error", "warn", "check"]
_MAX_DEPTH = 500
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Regex:
    """Text that `pattern` matches as a whole, in the dialect of Python's `re`."""

    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise GrammarError(f"a regex is text, not {type(self.pattern).__name__}; pass pattern.pattern or a string")

    @property
    def key(self) -> tuple[str, str]:
        return ("regex", self.pattern)


@dataclass(frozen=True, init=False)
class Choices:
    """Exactly one of `options`."""

    options: tuple[str, ...]

    def __init__(self, options: Iterable[str]) -> None:
        if isinstance(options, str):
            raise GrammarError(f"choices is the text {options!r}; pass a list of strings")
        given = tuple(options)
        for option in given:
            if not isinstance(option, str):
                raise GrammarError(f"a choice is text, not {type(option).__name__} ({option!r}); convert it with str()")
            _require_utf8(option, f"choice {option!r}")
        if not given:
            raise GrammarError("choices is empty; give at least one option")
        if len(set(given)) != len(given):
            twice = next(option for option in given if given.count(option) > 1)
            raise GrammarError(f"choice {twice!r} is given twice; options must differ")
        object.__setattr__(self, "options", given)

    @property
    def key(self) -> tuple[str, str]:
        return ("choices", json.dumps(self.options, ensure_ascii=False))


@dataclass(frozen=True, init=False)
class JsonSchema:
    """JSON text of a value that `schema` admits.

    schema     a schema as dict, bool or JSON text, a pydantic model class, or any type that pydantic
               has a schema for (dataclass, TypedDict, `list[int]`).
    documents  other schemas that `$ref` may lead to, by URI. Nothing is ever fetched.

    The schemas are copied when this is built. Two are equal when their JSON texts are: the order of
    `properties` is part of the constraint.
    """

    text: str
    documents_text: str
    schema: dict[str, Any] | bool = field(compare=False, repr=False)
    documents: dict[str, Any] = field(compare=False, repr=False)

    def __init__(self, schema: Any, documents: Mapping[str, Any] | None = None) -> None:
        text, parsed = _json_text(_as_schema(schema))
        if not isinstance(parsed, (dict, bool)):
            raise GrammarError(f"a JSON schema is an object or a boolean, not {text[:40]}", pointer="")
        given = {uri: _as_schema(other) for uri, other in (documents or {}).items()}
        others, copies = _json_text(given) if given else ("{}", {})
        self._set(text, parsed, others, copies)

    def _set(self, text: str, schema: Any, documents_text: str, documents: dict[str, Any]) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "documents_text", documents_text)
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "documents", documents)

    def __reduce__(self) -> tuple[object, ...]:
        return _read_again, (self.text, self.documents_text)

    def with_documents(self, documents: Mapping[str, Any]) -> JsonSchema:
        """The same schema beside these documents and those that it has already."""
        if not documents:
            return self
        found = object.__new__(JsonSchema)
        others = {uri: _as_schema(other) for uri, other in documents.items()}
        found._set(self.text, self.schema, *_json_text({**self.documents, **others}))
        return found

    @property
    def key(self) -> tuple[str, str]:
        return ("json_schema", self.text + (self.documents_text if self.documents else ""))


def _read_again(text: str, documents_text: str) -> JsonSchema:
    """The schema whose texts these are, from a pickle."""
    found = object.__new__(JsonSchema)
    found._set(text, json.loads(text), documents_text, json.loads(documents_text))
    return found


@dataclass(frozen=True)
class Lark:
    """Text of a context-free grammar: in llguidance's dialect of Lark, which starts with the rule `start`, or in
    EBNF as GBNF and xgrammar write it (`root ::= ...`), which starts with `root`.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise GrammarError("the Lark grammar is empty; define at least `start: ...`")
        for i, line in enumerate(self.text.splitlines(), 1):
            _require_utf8(line, f"line {i} of the Lark grammar")

    @property
    def key(self) -> tuple[str, str]:
        return ("lark", self.text)


@dataclass(frozen=True)
class Composite:
    """A language of nodes (`graftlm.core.grammar.nodes.nodes`), with the rules that its Rule nodes name.

    check  says what is wrong with a finished text that the language allows, None if nothing is; for requests with
           `on_unsupported="check"`.
    markers  names of the special tokens that `node` requires, as `vocabulary.SPECIAL` and their name; they are shown
             in the text
    has_header  whether the language includes the header of a channel (see `graftlm.core.chat.harmony`)
    """

    node: Node
    rules: tuple[tuple[str, Node], ...] = ()
    check: Callable[[str], str | None] | None = field(default=None, compare=False)
    markers: tuple[str, ...] = ()
    has_header: bool = False

    @property
    def key(self) -> tuple[str, Composite]:
        return ("composite", self)


Spec = Regex | Choices | JsonSchema | Lark | Composite


@dataclass(frozen=True)
class Limits:
    """How much one constraint may cost before it is refused.

    states        states of the automaton.
    seconds       processor time of the thread that compiles; by the clock at most 25 times as much, on a busy machine.
    memory_bytes  memory for an automaton while it is built.
    depth         nesting of the schema or pattern.
    size          characters of the schema, pattern or grammar.
    """

    states: int = 400_000
    seconds: float = 5.0
    depth: int = 64
    size: int = 4_000_000
    memory_bytes: int = 300_000_000

    def __post_init__(self) -> None:
        for name in ("states", "seconds", "depth", "size", "memory_bytes"):
            value = getattr(self, name)
            if not (value > 0 and (name == "seconds" or math.isfinite(value))):
                raise ConfigError(f"limits.{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Issue:
    """One thing of a schema that the grammar does not keep: what was found, where, and what became of it."""

    pointer: str
    keyword: str
    message: str

    def __str__(self) -> str:
        return f"{self.pointer or '/'}: {self.message}"


@dataclass(frozen=True)
class Options:
    """How a constraint is turned into a grammar.

    strict          close objects that declare `properties` and do not say otherwise.
    whitespace      between JSON tokens: "compact" none, "single" one space after "," and ":",
                    "flexible" at most 20 blanks or line breaks anywhere JSON allows them.
    on_unsupported  "error" raises for a keyword that cannot be kept; "warn" drops it and says so; "check" does the same
                    for what jsonschema can judge, which requests then do on the finished text.
    bounded_numbers  leave out numbers that common readers do not hold, where the schema sets no bounds: integers of
                    more than 18 digits, others of more than 17 significant digits.
    engine          the engine to use; None picks the fastest that keeps the constraint.
    """

    strict: bool = True
    whitespace: Whitespace = "compact"
    on_unsupported: OnUnsupported = "error"
    limits: Limits = field(default_factory=Limits)
    engine: str | None = None
    bounded_numbers: bool = False

    def __post_init__(self) -> None:
        if self.whitespace not in get_args(Whitespace):
            raise ConfigError(f"whitespace is {self.whitespace!r}; use 'compact', 'single' or 'flexible'")
        if self.on_unsupported not in get_args(OnUnsupported):
            raise ConfigError(f"on_unsupported is {self.on_unsupported!r}; use 'error', 'warn' or 'check'")


def _require_utf8(text: str, name: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise GrammarError(f"{name} holds a lone surrogate, which UTF-8 cannot write; remove it")


def _as_schema(schema: Any) -> Any:
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}", pointer="") from error
    if isinstance(schema, (dict, bool)):
        return schema
    from pydantic.errors import PydanticUserError

    from graftlm.core.grammar.python_types.pydantic_schema import schema_of

    try:
        return schema_of(schema)
    except PydanticUserError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise GrammarError(
            f"{schema!r} has no JSON schema: {reason}; pass a dict, a boolean or a pydantic class", pointer=""
        ) from error


def _json_text(schema: Any) -> tuple[str, Any]:
    """`schema` as JSON text, and a copy of it read from there."""
    with paused():
        return _encoded(schema)


def _encoded(schema: Any) -> tuple[str, Any]:
    try:
        text = _encode(schema)
        copy = json.loads(text)
        # what comes back as it was has no keys but strings
        if copy == schema and (text.count("{") + text.count("[") <= _MAX_DEPTH or _depth(copy) <= _MAX_DEPTH):
            return text, copy
    except (TypeError, ValueError, RecursionError):
        pass
    _check_keys(schema, "", 0)
    try:
        text = _encode(schema)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the schema is not plain JSON: {error}", pointer="") from error
    return text, json.loads(text)


def _depth(value: Any) -> int:
    """How many objects and arrays lie in one another."""
    depth, level = 0, [value]
    while level:
        inner = [item for outer in level for item in (outer.values() if type(outer) is dict else outer)]
        level = [item for item in inner if type(item) is dict or type(item) is list]
        depth += 1
    return depth


def _check_keys(value: Any, pointer: str, depth: int) -> None:
    # json.dumps would turn the key 1 into "1" and fail on deep nesting with a RecursionError
    if depth > _MAX_DEPTH:
        raise GrammarError(f"the schema nests deeper than {_MAX_DEPTH} levels at {pointer[:60]}...", pointer=pointer)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise GrammarError(f"{pointer or '/'}: key {key!r} is not text; JSON keys are strings", pointer=pointer)
            _check_keys(item, f"{pointer}/{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_keys(item, f"{pointer}/{i}", depth + 1)
