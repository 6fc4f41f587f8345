"""The JSON schema of an output type, closed where pydantic's own leaves open what its validator then refuses."""

from __future__ import annotations

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
