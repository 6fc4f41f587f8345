"""Answer formats: OpenAI's `response_format` read as a JSON schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graftlm.core.config import near_name
from graftlm.core.errors import ConfigError

_BESIDE = ("name", "description", "strict")
_FIELDS = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema", "schema", *_BESIDE),
}


def schema_of_format(response_format: Mapping[str, Any]) -> Any:
    """Return the JSON schema of the answer; None for free text.

    Takes OpenAI's three forms of chat completions, the flat one of its Responses API
    (`{"type": "json_schema", "name": ..., "schema": ...}`), and a `schema` beside `"json_object"`, as llama.cpp has it.

    Raises: ConfigError that names an unknown field, or shows the forms.
    """
    kind = response_format.get("type")
    if isinstance(kind, str) and kind in _FIELDS:
        _reject_unknown(response_format, _FIELDS[kind], "response_format")
        match response_format:
            case {"type": "text"}:
                return None
            case {"json_schema": Mapping() as inner} if "schema" not in response_format:
                _reject_unknown(inner, ("schema", *_BESIDE), "response_format.json_schema")
                if inner.get("schema") is not None:
                    return inner["schema"]
            case {"schema": schema} if schema is not None and "json_schema" not in response_format:
                return schema
            case {"type": "json_object"}:
                return {"type": "object"}
    raise ConfigError(
        f"response_format is {str(response_format)[:80]!r}; give {{'type': 'text'}}, {{'type': 'json_object'}} or "
        "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': ...}}"
    )


def _reject_unknown(given: Iterable[str], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            near = near_name(name, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}.{name} is unknown; {hint}")
