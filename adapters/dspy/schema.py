"""The JSON schema of an object that a prompt describes in words."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any

_FIELDS = re.compile(r"Respond with a JSON object in the following order of fields: (.+)\.\s*\Z", re.DOTALL)
_FIELD = re.compile(r"`(\w+)`(?: \(must be formatted as a valid Python (.+?)\))?(?=, then `|\Z)", re.DOTALL)
_TYPES = {"": "string", "str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def asked_object(prompt: str) -> dict[str, Any]:
    """Return the schema of the object that a prompt of DSPy's JSONAdapter describes; without one, any object.

    JSONAdapter sends no schema if a field is an open dict, such as the arguments of ReAct's tools. The last sentence of
    its prompt then names the fields and their types.
    """
    found = _FIELDS.search(prompt)
    fields = {name: _type_of(kind) for name, kind in _FIELD.findall(found.group(1))} if found else {}
    if not fields:
        return {"type": "object"}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _type_of(annotation: str) -> dict[str, Any]:
    """Return the schema of a type as DSPy prints it; {} for a type that the text does not determine."""
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    if annotation.startswith("Literal["):
        with suppress(ValueError, SyntaxError):
            return {"enum": list(ast.literal_eval(annotation.removeprefix("Literal")))}
    return {"type": "object"} if annotation.startswith("dict") else {}
