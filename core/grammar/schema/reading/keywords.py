"""The keywords of JSON Schema: which are kept, which say nothing about the value, which cannot be kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

OF_TYPE: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "contentSchema"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        "unevaluatedProperties",
    ),
}
"""Keywords that speak of one type only."""

GENERAL = (
    "type",
    "enum",
    "const",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "nullable",
)

SILENT = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$comment", "$vocabulary"),
        *("$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("then", "else"),  # without `if` they say nothing
    }
)
"""Keywords of the standard that restrict no value."""

SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "contentEncoding", "contentMediaType"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains", "$recursiveRef"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}
"""The draft that brought a keyword, of those that draft 4 lacks."""
NEWER = frozenset(SINCE)

TOO_OLD = (
    "the drafts before draft 4 are not kept; name a later one, list the required names in the object, and write "
    "allOf for 'extends', not for 'disallow', multipleOf for 'divisibleBy', anyOf for schemas in 'type'"
)

UNSUPPORTED = "x-unsupported"
"""A constraint of a Python type that no keyword holds: its value is the reason."""

KNOWN = frozenset({*GENERAL, *SILENT, *(word for words in OF_TYPE.values() for word in words)})

BESIDE_REFERENCE = SILENT | {"$ref"}
"""Keywords that change nothing beside a `$ref`, in any draft: a schema of these alone means what it refers to."""

OF_STRINGS = frozenset(OF_TYPE["string"])
OF_ITEMS = frozenset(OF_TYPE["array"]) - {"items", "unevaluatedItems"}


def _letters(keyword: str) -> str:
    return keyword.lower().strip(" :").replace("_", "").replace("-", "")


_CONSTRAINING = {known: _letters(known) for known in [*sorted(KNOWN - SILENT), "then", "else"]}
"""With their letters as misspellings are looked for."""


@lru_cache(maxsize=4096)
def near_miss(keyword: str) -> str | None:
    """The constraining keyword that `keyword` is probably a misspelling of.

    Spelled alike but for case and separators, or one typing error away (two in a word of nine letters or more; in words
    of four letters or fewer only a swap). None for a name that begins with `_`, `$` or `x-`: those are marked as notes;
    and for one made of the keyword and a word before it, as `tsAdditionalProperties` is.
    """
    if keyword.startswith(("_", "$", "x-")):
        return None
    word = _letters(keyword)
    near = (known for known, target in _CONSTRAINING.items() if _is_near(word, target))
    return next((known for known in near if not keyword[1:].endswith(known[0].upper() + known[1:])), None)


def is_misspelled(name: str, known: str) -> bool:
    """Whether `name` is `known` but for case and separators, or for typing errors that its length makes likely."""
    return _is_near(_letters(name), _letters(known))


def _is_near(word: str, target: str) -> bool:
    """Whether `word` is `target` but for typing errors that its length makes likely."""
    allowed = 1 if len(target) < 9 else 2
    return word == target or (
        abs(len(word) - len(target)) <= allowed
        and (len(target) > 4 or sorted(word) == sorted(target))
        and len(set(word).difference(target)) <= allowed  # each of these takes an error
        and _typing_errors(word, target) <= allowed
    )


def _typing_errors(a: str, b: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to turn `a` into `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y))
            if above and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]


_TYPED = frozenset(("type", *(word for words in OF_TYPE.values() for word in words)))


def own_place(schema: Mapping[str, Any]) -> str | None:
    """The keyword at whose place the schema's own properties come among those of its applicators."""
    if "properties" in schema:
        return "properties"
    for keyword in schema:
        if keyword in _TYPED:
            return keyword
    return None


def of_old_drafts(documents: Mapping[str, Any]) -> Iterator[str]:
    """The roots of those documents whose `$schema` names a draft before draft 4: its keywords say other things."""
    for uri, document in documents.items():
        name = document.get("$schema") if isinstance(document, dict) else None
        if isinstance(name, str) and re.search(r"json-schema\.org/draft-0[0-3]/", name):
            yield f"{uri}#" if uri else ""


def excludes(text: str) -> bool:
    """Whether schemas may have keywords that ask which values another schema does not admit."""
    return any(word in text for word in ('"not"', '"if"', '"oneOf"', '"maxContains"', '"unevaluated'))


def implied_types(schema: Mapping[str, Any], strict: bool) -> list[str]:
    """The types that a schema without `type` admits: all, but in strict mode the one that its keywords speak of."""
    spoken_of = [name for name, words in OF_TYPE.items() if any(word in schema for word in words)]
    if strict and len(spoken_of) == 1 and not {"enum", "const"} & set(schema):
        return spoken_of
    return ["null", "boolean", "number", "string", "array", "object"]
