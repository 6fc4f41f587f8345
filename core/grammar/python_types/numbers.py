"""Integers, floats, decimals, fractions and complex numbers."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from graftlm.core.grammar.python_types.range_patterns import NUMBER
from graftlm.core.grammar.python_types.refusals import NOTHING
from graftlm.core.grammar.python_types.texts import configured_lengths

_MAX_DIGITS: Final = 17
"""Digits that float64 keeps apart. A decimal that may have more has no more than these."""
_COMPLEX: Final = rf"{NUMBER}[+-](0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,12}})?j"
_BYTE_SIZE: Final = r"(0|[1-9][0-9]{0,11})(\.[0-9]{1,3})?( ?([kKmMgGtTpPeE][iI]?)?[bB])?"
_UPWARD: Final = {"ge": True, "gt": True, "le": False, "lt": False}


def int_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    return _possible(schema, GenerateJsonSchema.int_schema(generator, schema))


def float_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    return _possible(schema, GenerateJsonSchema.float_schema(generator, schema))


def _possible(schema: Any, described: JsonSchemaValue) -> JsonSchemaValue:
    """Return `described`, or nothing where a bound admits no finite number: pydantic leaves infinite bounds out."""
    lows, highs = ([schema.get(name) for name in names] for names in (("gt", "ge"), ("lt", "le")))
    numbers = [bound for bound in (*lows, *highs) if isinstance(bound, float)]
    never = math.inf in lows or -math.inf in highs or any(map(math.isnan, numbers))
    return {**described, **NOTHING} if never else described


def decimal_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    """Return the schema of a number: pydantic's own also admits any string."""
    number = _number(generator, schema)
    digits, places = schema.get("max_digits"), schema.get("decimal_places")
    if digits is not None and (places is None or places <= _MAX_DIGITS):
        digits = min(digits, _MAX_DIGITS)
    if places is None and digits is None:
        return number
    forms = [_decimals(digits, n) for n in ([places] if places is not None else range(digits or 0, -1, -1))]
    return {"allOf": [number, forms[0] if len(forms) == 1 else {"anyOf": forms}]}


def fraction_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    """Return the schema of a number: pydantic's own also admits any string."""
    return _number(generator, schema)


def complex_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    return {"type": "string", "pattern": f"^{_COMPLEX}$"}


def byte_size_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    """Return the schema of a number of bytes, or, without bounds, a number with a unit."""
    bounds = {name: schema[name] for name in _UPWARD if schema.get(name) is not None}
    size = {"minimum": 0, **int_schema(generator, core_schema.int_schema(**bounds))}
    if bounds:
        return {"allOf": [size, {"minimum": 0}]}
    lengths = configured_lengths(generator._config, {})
    return {"anyOf": [{"type": "string", **lengths, "pattern": f"^{_BYTE_SIZE}$"}, size]}


def _number(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    given: dict[str, Any] = {}
    for name, upward in _UPWARD.items():
        if schema.get(name) is not None:
            given[name] = _inward(schema[name], upward)
    if schema.get("multiple_of") is not None:
        given["multiple_of"] = float(schema["multiple_of"])
    return float_schema(generator, core_schema.float_schema(**given))


def _inward(bound: Decimal | Fraction | float, upward: bool) -> float:
    """Return the float that is nearest to `bound` on the side of the values that it admits."""
    try:
        nearest = float(bound)
    except OverflowError:
        nearest = math.inf if bound > 0 else -math.inf
    if math.isinf(nearest):
        inside = (nearest < 0) == upward  # a bound beyond every float
        return nearest if inside else (math.inf if upward else -math.inf)
    exact = Decimal(repr(nearest)) if isinstance(bound, Decimal) else Fraction(repr(nearest))
    outside = exact < bound if upward else exact > bound
    return math.nextafter(nearest, math.inf if upward else -math.inf) if outside else nearest


def _decimals(digits: int | None, places: int) -> JsonSchemaValue:
    """Return the schema of numbers of at most `digits` digits, `places` of them behind the point."""
    step = Decimal(1).scaleb(-places)
    number: JsonSchemaValue = {"type": "number", "multipleOf": float(step) if places else 1}
    if digits is None or digits > _MAX_DIGITS:
        return number
    largest = Decimal(1).scaleb(digits - places) - step
    number |= {"minimum": float(-largest), "maximum": float(largest)}
    return {**number, "not": {"const": 0}} if digits == places else number  # pydantic counts the digit of 0
