"""The JSON schemas of outputs: of a type, closed where pydantic's own is open; of an object that a prompt describes."""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

INTEGER: Final = r"-?(0|[1-9][0-9]{0,17})"
NUMBER: Final = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,12})?"
_KEYS: Final = {"int": INTEGER, "float": NUMBER, "bool": "true|false"}
_TIME: Final = "[0-9]{1,4}H([0-9]{1,4}M)?([0-9]{1,4}S)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S"
_DURATION: Final = rf"-?P([0-9]{{1,6}}D(T({_TIME}))?|T({_TIME}))"
_COMPLEX: Final = rf"{NUMBER}[+-](0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,12}})?j"


class OutputSchema(GenerateJsonSchema):
    """Keys of a dict that are numbers, durations within timedelta's range, complex numbers."""

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        described = super().dict_schema(schema)
        keys: Any = schema.get("keys_schema", {})
        pattern = _KEYS.get(keys.get("type"))
        return described if pattern is None else {**described, "propertyNames": {"pattern": f"^({pattern})$"}}

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_DURATION}$"}

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_COMPLEX}$"}


_FIELDS = re.compile(r"Respond with a JSON object in the following order of fields: (.+)\.\s*\Z", re.DOTALL)
_FIELD = re.compile(r"`(\w+)`(?: \(must be formatted as a valid Python (.+?)\))?(?=, then `|\Z)", re.DOTALL)
_TYPES = {"": "string", "str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def asked_object(prompt: str) -> dict[str, Any]:
    """The schema of an object that is asked for without one: with the fields that DSPy's JSONAdapter names, if it does.

    It sends no schema where a field is an open dict, such as the arguments of ReAct's tools. The prompt then names the
    fields and their types in its last sentence.
    """
    found = _FIELDS.search(prompt)
    fields = {name: _type_of(kind) for name, kind in _FIELD.findall(found.group(1))} if found else {}
    if not fields:
        return {"type": "object"}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _type_of(annotation: str) -> dict[str, Any]:
    """The schema of a type as DSPy prints it; any value where that tells too little."""
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    if annotation.startswith("Literal["):
        with suppress(ValueError, SyntaxError):
            return {"enum": list(ast.literal_eval(annotation.removeprefix("Literal")))}
    return {"type": "object"} if annotation.startswith("dict") else {}
