"""The one spelling of a JSON value: equal for values that are equal."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from graftlm.core.grammar.schema.distinct.item_language import as_read


class _Number(NamedTuple):
    """A number as it is written."""

    text: str


def one_spelling(item: bytes) -> str:
    """Equal for equal values: 1 and 1.0, members in any order, characters escaped or not."""
    if item[:1] == b'"' and b"\\" not in item:
        return item.decode()
    return _canonical(json.loads(item, parse_float=_Number, parse_int=_Number))


def _canonical(value: Any) -> str:
    match value:
        case dict():
            return (
                "{" + ",".join(sorted(f"{json.dumps(name)}:{_canonical(item)}" for name, item in value.items())) + "}"
            )
        case list():
            return "[" + ",".join(map(_canonical, value)) + "]"
        case _Number(text):
            return as_read(text)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return json.dumps(value)
