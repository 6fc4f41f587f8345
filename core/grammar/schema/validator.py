"""A process that judges JSON texts with jsonschema: one job a line on its input, one answer a line on its output.

It runs apart because a pattern can take Python's `re` for ever; who waits for it can end it. It imports nothing of
GraftLM, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import signal
import sys
from decimal import Decimal
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from jsonschema.validators import validator_for  # type: ignore[import-untyped]
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Resource
from referencing.jsonschema import DRAFT202012


@functools.lru_cache(maxsize=64)
def validator(schema_text: str, documents_text: str = "{}", *, exact: bool = False) -> Any:
    """What judges values by a schema; with `exact` its numbers are Decimal, and those of the values have to be."""
    number = Decimal if exact else None
    schema = json.loads(schema_text, parse_float=number)
    documents = json.loads(documents_text, parse_float=number)
    resources = [
        (uri, Resource.from_contents(document, default_specification=DRAFT202012))
        for uri, document in documents.items()
    ]
    kind = _extended(validator_for(schema, default=_any_draft()))
    return kind(schema, registry=REGISTRY.with_resources(resources), format_checker=kind.FORMAT_CHECKER)


def _any_draft() -> Any:
    """Draft 2020-12 with the words of older drafts, for a schema that names none."""
    old, latest = jsonschema.Draft4Validator.VALIDATORS, jsonschema.Draft202012Validator.VALIDATORS
    changed: dict[str, Any] = {"dependencies": jsonschema.Draft7Validator.VALIDATORS["dependencies"]}

    def of_either(word: str, is_old: Any, otherwise: Any) -> None:
        def errors(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            check = old[word] if is_old(schema) else otherwise
            yield from (check(validator, value, instance, schema) or () if check else ())

        changed[word] = errors

    for word in ("items", "additionalItems"):
        of_either(word, lambda schema: isinstance(schema.get("items"), list), latest.get(word))
    for word, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        of_either(word, lambda schema, key=exclusive: isinstance(schema.get(key), bool), latest[word])
        changed[exclusive] = lambda validator, value, instance, schema, key=exclusive: (
            None if isinstance(value, bool) else latest[key](validator, value, instance, schema)
        )
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, changed)


def _extended(kind: Any) -> Any:
    """`kind` that knows OpenAPI's `nullable`, and looks into JSON inside strings."""

    def unless_null(check: Any) -> Any:
        def errors(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
            if instance is not None or schema.get("nullable") is not True:
                yield from check(validator, value, instance, schema) or ()

        return errors

    words = {**kind.VALIDATORS, **({} if kind in _WITHOUT_CONTENT else {"contentMediaType": _json_inside})}
    return jsonschema.validators.extend(kind, {word: unless_null(check) for word, check in words.items()})


_WITHOUT_CONTENT = (jsonschema.Draft3Validator, jsonschema.Draft4Validator, jsonschema.Draft6Validator)
"""Drafts to which what a string contains is a note."""


def _json_inside(validator: Any, media: Any, instance: Any, schema: Any) -> Any:
    """JSON in a string, which some readers hold to `contentSchema`."""
    is_json = isinstance(media, str) and media.partition(";")[0].strip() == "application/json"
    if is_json and isinstance(instance, str) and "contentEncoding" not in schema:
        try:
            inner = json.loads(instance)
        except ValueError as error:
            yield jsonschema.ValidationError(f"{instance!r} is not JSON: {error}")
        else:
            yield from validator.descend(inner, schema.get("contentSchema", {}))


class _Patterns:
    r"""`re` as jsonschema's keywords use it; the package `regex` for \p{...} and what it refuses."""

    @staticmethod
    def search(pattern: str, text: str) -> Any:
        if "\\p" not in pattern.lower():
            with contextlib.suppress(re.error):
                return re.search(pattern, text)
        import regex

        return regex.search(pattern, text)


for _module in ("_keywords", "_legacy_keywords", "_utils"):  # no public place takes another search
    if hasattr(jsonschema, _module):
        getattr(jsonschema, _module).re = _Patterns


def complaint(schema: str, documents: str, formats: list[str], text: str) -> str | None:
    """What is wrong with `text`; None if nothing is. `formats` are those that have to be checked.

    Raises LookupError for a format that nothing here checks.
    """
    judge = validator(schema, documents)
    unknown = sorted(set(formats) - set(judge.format_checker.checkers))
    if unknown:
        raise LookupError(f"format {unknown[0]!r} is checked by nothing installed; pip install 'jsonschema[format]'")
    error = jsonschema.exceptions.best_match(judge.iter_errors(json.loads(text)))
    if error is None:
        return None
    return f"/{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}"


_LONGEST_S = 60
"""Seconds after which the system ends this process within one job, by the clock: its parent may have been killed."""


def main() -> None:
    alarm = getattr(signal, "alarm", lambda seconds: None)
    for line in sys.stdin:
        alarm(_LONGEST_S)
        try:
            answer = {"complaint": complaint(**json.loads(line))}
        except Exception as error:
            answer = {"failure": f"{type(error).__name__}: {error}"[:500]}
        alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
