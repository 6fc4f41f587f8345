"""JSON schemas of Python types whose every text pydantic reads: closed where pydantic's own are wider than it reads."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final
from weakref import WeakKeyDictionary

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

INTEGER: Final = r"-?(0|[1-9][0-9]{0,17})"
NUMBER: Final = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,12})?"
_KEYS: Final = {"int": INTEGER, "float": NUMBER, "bool": "true|false"}
_TIME: Final = "[0-9]{1,4}H([0-9]{1,4}M)?([0-9]{1,4}S)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S"
_DURATION: Final = rf"-?P([0-9]{{1,6}}D(T({_TIME}))?|T({_TIME}))"
_COMPLEX: Final = rf"{NUMBER}[+-](0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,12}})?j"
_LABEL: Final = "[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*"
_HOST: Final = rf"({_LABEL}\.)*[a-zA-Z][a-zA-Z0-9]*(-[a-zA-Z0-9]+)*"
_CHARS: Final = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*"
_REST: Final = rf"(:[1-9][0-9]{{0,3}})?(/{_CHARS})?(\?{_CHARS})?(#{_CHARS})?"
_MAX_DIGITS: Final = 17
"""Digits that float64 keeps apart. A decimal that may have more is described as any number."""


_classes: WeakKeyDictionary[type[BaseModel], tuple[dict[str, Any], bool]] = WeakKeyDictionary()


def class_schema(kind: type[BaseModel]) -> tuple[dict[str, Any], bool]:
    """The schema of a class, and whether pydantic's own admits more. Made once: agents give tools to each call."""
    if kind not in _classes:
        closed = schema_of(kind)
        _classes[kind] = closed, closed != kind.model_json_schema()
    return _classes[kind]


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic class, a TypeAdapter or any type that pydantic knows.

    Raises: PydanticUserError where pydantic has no JSON schema for it.
    """
    if hasattr(kind, "model_json_schema"):
        described: dict[str, Any] = kind.model_json_schema(schema_generator=OutputSchema)
        return described
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    return adapter.json_schema(schema_generator=OutputSchema)


class OutputSchema(GenerateJsonSchema):
    """pydantic's own schemas, narrowed to what pydantic reads.

    These are dicts with numbers as keys, timedeltas, complex numbers, decimals and URLs.
    """

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        described = super().dict_schema(schema)
        keys: Any = schema.get("keys_schema", {})
        pattern = _KEYS.get(keys.get("type"))
        return described if pattern is None else {**described, "propertyNames": {"pattern": f"^({pattern})$"}}

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_DURATION}$"}

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_COMPLEX}$"}

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """A number: pydantic's own also admits any string."""
        values: dict[str, Any] = {**schema}
        bounds = [name for name in ("multiple_of", "le", "ge", "lt", "gt") if values.get(name) is not None]
        given: dict[str, Any] = {name: float(values[name]) for name in bounds}
        number = self.float_schema(core_schema.float_schema(**given))
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if places is None and (digits is None or digits > _MAX_DIGITS):
            return number
        forms = [_decimals(digits, n) for n in ([places] if places is not None else range(digits or 0, -1, -1))]
        return {"allOf": [number, forms[0] if len(forms) == 1 else {"anyOf": forms}]}

    def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
        return self._with_scheme(schema.get("allowed_schemes"), super().url_schema(schema))

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        return self._with_scheme(schema.get("allowed_schemes"), super().multi_host_url_schema(schema))

    def _with_scheme(self, schemes: list[str] | None, described: JsonSchemaValue) -> JsonSchemaValue:
        """The URLs of these schemes, with a host but for files; any URL where none are named."""
        if not schemes:
            return described
        del described["format"]
        place = f"/{_CHARS}" if schemes == ["file"] else f"{_HOST}{_REST}"
        return {**described, "pattern": f"^({'|'.join(map(re.escape, schemes))})://{place}$"}


def _decimals(digits: int | None, places: int) -> JsonSchemaValue:
    """Numbers of at most `digits` digits, `places` of them behind the point."""
    step = Decimal(1).scaleb(-places)
    number: JsonSchemaValue = {"type": "number", "multipleOf": float(step) if places else 1}
    if digits is None or digits > _MAX_DIGITS:
        return number
    largest = Decimal(1).scaleb(digits - places) - step
    number |= {"minimum": float(-largest), "maximum": float(largest)}
    return {**number, "not": {"const": 0}} if digits == places else number  # pydantic counts the digit of 0
