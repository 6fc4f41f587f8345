"""Constraints that pydantic applies in Python behind a validator, moved into the schema of their type.

`Annotated[int, AfterValidator(f), Field(gt=3)]` compares the value that `f` returned. The constraint is kept for the
value in the text: a validator that changes the value is not followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from pydantic import ByteSize, EncodedBytes, EncodedStr

Schema = dict[str, Any]
Definitions = Mapping[str, Schema]

_BOUNDS: Final = frozenset({"gt", "ge", "lt", "le"})
_NUMERIC: Final = _BOUNDS | {"multiple_of"}
_LENGTHS: Final = frozenset({"min_length", "max_length"})
_CHANGES: Final = frozenset({"strip_whitespace", "to_lower", "to_upper", "coerce_numbers_to_str"})
_TEXTUAL: Final = _CHANGES | {"pattern", "ascii_only"}
_NATIVE: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(("int", "float", "fraction", "timedelta"), _NUMERIC),
    **dict.fromkeys(("date", "time", "datetime"), _BOUNDS),
    **dict.fromkeys(("bytes", "list", "deque", "tuple", "set", "frozenset", "generator"), _LENGTHS),
    **dict.fromkeys(("dict", "frozendict", "ordered-dict", "counter"), _LENGTHS),
    "decimal": _NUMERIC | {"max_digits", "decimal_places"},
    "str": _LENGTHS | _TEXTUAL,
}
_NAMES: Final = _NUMERIC | _LENGTHS | _TEXTUAL | {"max_digits", "decimal_places"}
_WRAPPED: Final = {
    **dict.fromkeys(("function-before", "function-after", "function-wrap", "default", "nullable"), "schema"),
    **dict.fromkeys(("custom-error", "definitions", "json"), "schema"),
    "lax-or-strict": "lax_schema",
    "json-or-python": "json_schema",
}
JS_KEYS: Final = _NUMERIC | {"minLength", "maxLength", "minItems", "maxItems", "max_digits", "decimal_places"}
"""Keywords that pydantic writes beside such a validator, whatever the type."""
_JSON_GROUPS: Final = {
    **dict.fromkeys(("int", "float", "decimal", "fraction", "bool"), "number"),
    **dict.fromkeys(("str", "bytes", "date", "time", "datetime", "timedelta", "uuid", "url", "complex"), "string"),
    **dict.fromkeys(("list", "deque", "tuple", "set", "frozenset", "generator", "named-tuple"), "array"),
    **dict.fromkeys(("dict", "frozendict", "ordered-dict", "counter", "model", "dataclass", "typed-dict"), "object"),
}
_LOOSEST: Final[dict[str, Callable[[Any, Any], Any]]] = {
    **dict.fromkeys(("gt", "ge", "min_length"), max),
    **dict.fromkeys(("lt", "le", "max_length", "max_digits", "decimal_places"), min),
}
_MACHINE: Final = "depends on the machine that reads it; use Path"
_REFUSED: Final = {
    "import_string": "an import depends on the process that reads it; use str",
    "pattern_bytes_validator": "no JSON value is read as a pattern of bytes; use re.Pattern[str]",
    "validate_str_is_valid_iana_tz": "names of time zones depend on the machine; use a Literal of names",
    "PaymentCardNumber.validate": "the check digit of card numbers cannot be kept; use str with a pattern",
    "PathType.validate_file": f"a path of a file {_MACHINE}",
    "PathType.validate_directory": f"a path of a folder {_MACHINE}",
    "PathType.validate_new": f"a path of a new file {_MACHINE}",
    "PathType.validate_socket": f"a path of a socket {_MACHINE}",
}


def function_of(schema: Mapping[str, Any]) -> Any:
    """Return the validator of a function schema, else None."""
    found = schema.get("function")
    return found.get("function") if isinstance(found, dict) else None


def refusal(schema: Mapping[str, Any]) -> str | None:
    """Return the reason why no grammar keeps pydantic's own validator of a function schema, else None."""
    function = function_of(schema)
    function = getattr(function, "__func__", function)
    if not str(getattr(function, "__module__", "")).startswith("pydantic."):
        return None
    return _REFUSED.get(function.__qualname__)


def reads_own_text(schema: Schema) -> bool:
    """Return True if a type of pydantic's own reads a text below the validators of `schema`."""
    while True:
        if isinstance(owner := owner_of(schema), (EncodedBytes, EncodedStr)) or owner is ByteSize:
            return True
        if schema["type"] not in _WRAPPED or schema["type"] == "json" or _WRAPPED[schema["type"]] not in schema:
            return False
        schema = schema[_WRAPPED[schema["type"]]]


def owner_of(schema: Mapping[str, Any]) -> Any:
    """Return the object or class whose method a function schema calls, else None."""
    return getattr(function_of(schema), "__self__", None)


def constraints_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constraints that a validator of pydantic's applies behind a type."""
    function = function_of(schema)
    inner = getattr(function, "func", None)  # a functools.partial
    if inner is not None and str(inner.__module__).endswith("pydantic._internal._validators"):
        given = {**dict(function.keywords), **(function.args[0] if function.args else {})}
        return {name: value for name, value in given.items() if name in _NAMES and value is not None}
    return {}


def steps_of(schema: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the constraints, and the type that they need, of each later step of a chain."""
    for step in schema["steps"][1:]:
        while step["type"].startswith("function-") and "schema" in step:
            step = step["schema"]
        yield {name: value for name, value in step.items() if name in _NAMES and value is not None}, step["type"]


def base(schema: Schema, definitions: Definitions) -> Schema:
    """Return the schema below the validators, defaults and references of `schema`."""
    while True:
        kind: str = schema["type"]
        if kind == "chain":
            schema = schema["steps"][0]
        elif kind == "definition-ref" and schema["schema_ref"] in definitions:
            schema = definitions[schema["schema_ref"]]
        elif kind in _WRAPPED and kind != "json" and _WRAPPED[kind] in schema:
            schema = schema[_WRAPPED[kind]]
        else:
            return schema


def secret_of(schema: Schema) -> Any:
    """Return the class of a secret that `schema` reads, else None."""
    inner = schema.get("lax_schema", {}).get("json_schema", {})
    function = function_of(inner)
    return function if isinstance(function, type) else None


def lengths(given: Mapping[str, Any]) -> Schema:
    """Return the keywords of strings for `given`, {} if it has others than lengths."""
    if not given.keys() <= _LENGTHS:
        return {}
    return {{"min_length": "minLength", "max_length": "maxLength"}[name]: value for name, value in given.items()}


def constrained(schema: Schema, given: dict[str, Any], definitions: Definitions) -> Schema | None:
    """Return `schema` with these constraints, or None if its type has no such constraints.

    None, and the types in a union without the constraints, are left out: pydantic raises TypeError for them.
    """
    for name, value in given.items():
        found = _pushed(schema, name, value, definitions)
        if found is None:
            return None
        schema = found
    return schema


def _pushed(schema: Schema, name: str, value: Any, definitions: Definitions) -> Schema | None:
    kind = schema["type"]
    if kind == "definition-ref":
        target = definitions.get(schema["schema_ref"])
        return None if target is None else _pushed(target, name, value, definitions)
    if name in _NATIVE.get(kind, ()):
        return _merged(schema, name, value)
    if isinstance(owner_of(schema), (EncodedBytes, EncodedStr)):
        return _merged(schema, name, value) if name in _LENGTHS else None
    if owner_of(schema) is ByteSize:
        return _merged(schema, name, value) if name in _BOUNDS else None
    if kind == "union":
        return _pushed_into_union(schema, name, value, definitions)
    if kind == "chain":
        first = _pushed(schema["steps"][0], name, value, definitions)
        return None if first is None else {**_bare(schema), "steps": [first, *schema["steps"][1:]]}
    if kind == "literal" and name in _BOUNDS:
        return _compared(schema, name, value)
    if kind not in _WRAPPED or _WRAPPED[kind] not in schema or _describes_itself(schema) or refusal(schema):
        return None
    if _reads_secret(schema):  # a Secret is no number and no string
        return None
    inner = _pushed(schema[_WRAPPED[kind]], name, value, definitions)
    if inner is None or kind == "nullable":
        return inner
    return {**_bare(schema), _WRAPPED[kind]: inner}


def _pushed_into_union(schema: Schema, name: str, value: Any, definitions: Definitions) -> Schema | None:
    """Return the choices that take the constraint; None if a value of theirs may be read as a choice without it."""
    choices = [choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"]]
    pushed = [_pushed(choice, name, value, definitions) for choice in choices]
    kinds = [str(base(choice, definitions)["type"]) for choice in choices]
    groups = [_JSON_GROUPS.get(kind, kind) for kind in kinds]
    kept = {group for group, found in zip(groups, pushed, strict=True) if found is not None}
    dropped = {group for group, found in zip(groups, pushed, strict=True) if found is None}
    left = [found for found in pushed if found is not None]
    return {**_bare(schema), "choices": left} if left and not kept & dropped else None


def _reads_secret(schema: Schema) -> bool:
    function = function_of(schema)
    return isinstance(function, type) or getattr(function, "__qualname__", "").startswith("Secret.__get_pydantic")


def _bare(schema: Schema) -> Schema:
    """Return `schema` without the name that definitions refer to."""
    return {key: value for key, value in schema.items() if key != "ref"}


def _describes_itself(schema: Schema) -> bool:
    metadata = schema.get("metadata", {})
    return bool(metadata.get("pydantic_js_functions") or metadata.get("pydantic_js_annotation_functions"))


def _merged(schema: Schema, name: str, value: Any) -> Schema | None:
    """Return `schema` with one constraint more."""
    kind, found = schema["type"], _bare(schema)
    if name in _NUMERIC and not _comparable(kind, value):
        return None
    if kind in ("datetime", "time"):  # Python compares moments with an offset, or moments without
        wanted = "naive" if value.utcoffset() is None else "aware"
        if found.get("tz_constraint", wanted) != wanted:
            return None
        found["tz_constraint"] = wanted
    if kind == "str" and name not in _CHANGES and (found.get("to_lower") or found.get("to_upper")):
        found["cased"] = "lower" if found.get("to_lower") else "upper"
    if name == "pattern" and name in found:
        return {**found, "patterns": (*found.get("patterns", ()), value)}
    if name == "multiple_of" and name in found and found[name] != value:
        return None
    if name in found and name in _LOOSEST:
        try:
            value = _LOOSEST[name](found[name], value)
        except TypeError:  # bounds that no value is compared with both
            return None
    return {**found, name: value}


def _comparable(kind: str, bound: Any) -> bool:
    """Return True if Python compares values of a type with `bound`."""
    if kind in ("date", "datetime", "time", "timedelta"):
        return type(bound).__name__ == kind
    return isinstance(bound, (int, float, Fraction) if kind == "fraction" else (int, float, Decimal, Fraction))


def _compared(schema: Schema, name: str, bound: Any) -> Schema | None:
    tests: dict[str, Callable[[Any], bool]] = {
        "gt": lambda value: value > bound,
        "ge": lambda value: value >= bound,
        "lt": lambda value: value < bound,
        "le": lambda value: value <= bound,
    }
    try:
        kept = [value for value in schema["expected"] if tests[name](value)]
    except TypeError:
        return None
    return {**_bare(schema), "expected": kept} if kept else None
