"""JSON schemas of Python types whose every text pydantic reads: closed where pydantic's own are wider than it reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Final
from weakref import WeakKeyDictionary

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from graftlm.core.grammar.schema.algebra.formats import FORMATS

_MOST_DIGITS: Final = 18
INTEGER: Final = r"-?(0|[1-9][0-9]{0,17})"
NUMBER: Final = r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,12})?"
_KEYS: Final = {"int": INTEGER, "float": NUMBER, "decimal": NUMBER, "bool": "true|false"}
_TIME: Final = "[0-9]{1,4}H([0-9]{1,4}M)?([0-9]{1,4}S)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S"
_DURATION: Final = rf"P([0-9]{{1,6}}D(T({_TIME}))?|T({_TIME}))"
_COMPLEX: Final = rf"{NUMBER}[+-](0|[1-9][0-9]{{0,15}})(\.[0-9]{{1,12}})?j"
_POSITIVE_TIME: Final = re.sub(r"(^|\|)\[0-9\]\{1,4\}", r"\1[1-9][0-9]{0,3}", _TIME)
_POSITIVE_DURATION: Final = rf"P([1-9][0-9]{{0,5}}D(T({_TIME}))?|T({_POSITIVE_TIME}))"
_NAIVE: Final = rf"({FORMATS['date']})T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?"
_LABEL: Final = "[a-zA-Z0-9]+(-[a-zA-Z0-9]+)*"
_HOST: Final = rf"({_LABEL}\.)*[a-zA-Z][a-zA-Z0-9]*(-[a-zA-Z0-9]+)*"
_CHARS: Final = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*"
_REST: Final = rf"(:[1-9][0-9]{{0,3}})?(/{_CHARS})?(\?{_CHARS})?(#{_CHARS})?"
_MAX_DIGITS: Final = 17
"""Digits that float64 keeps apart. A decimal that may have more has no more than these."""


def _networks_v4() -> str:
    """Networks of IPv4, in which the bits behind the prefix are 0."""
    octet, ways = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])", [r"0\.0\.0\.0/0"]
    for length in range(1, 33):
        whole, bits = divmod(length - 1, 8)
        part = "|".join(str(number) for number in range(0, 256, 1 << (7 - bits)))
        ways.append(
            "\\.".join([octet] * whole + [f"({part})" if bits < 7 else octet] + ["0"] * (3 - whole)) + f"/{length}"
        )
    return "|".join(ways)


def _networks_v6() -> str:
    """Networks of IPv6 whose prefix is a number of hexadecimal digits."""
    group, digit, ways = "[0-9a-fA-F]{1,4}", "[0-9a-fA-F]", ["::/0"]
    for digits in range(1, 33):
        whole, rest = divmod(digits - 1, 4)
        last = f"{digit}{{{rest + 1}}}{'0' * (3 - rest)}"
        ways.append(f"({group}:){{{whole}}}{last}{'::' if whole < 7 else ''}/{4 * digits}")
    return "|".join(ways)


_V4_NETWORK: Final = _networks_v4()
_V6_NETWORK: Final = _networks_v6()
_V4_INTERFACE: Final = f"{FORMATS['ipv4']}/([12]?[0-9]|3[0-2])"
_V6_INTERFACE: Final = f"{FORMATS['ipv6']}/([1-9]?[0-9]|1[01][0-9]|12[0-8])"
_BASE64URL: Final = "([a-zA-Z0-9_-]{4})*([a-zA-Z0-9_-][AQgw]==|[a-zA-Z0-9_-]{2}[AEIMQUYcgkosw048]=)?"
# At most 64 characters stand before the sign, and behind it at most 253 with a point, as email-validator wants it.
_ATOM: Final = "[a-zA-Z0-9!#$%&'*+/=?^_{|}~-]"
_LOCAL: Final = rf"({_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}|({_ATOM}{{1,12}}\.){{1,4}}{_ATOM}{{1,12}})"
_EMAIL_LABEL: Final = "[a-zA-Z0-9]{1,20}(-[a-zA-Z0-9]{1,20}){0,2}"
_EMAIL: Final = rf"{_LOCAL}@({_EMAIL_LABEL}\.){{1,3}}[a-zA-Z]{{2,20}}"
_PATTERNS: Final = {
    "email": _EMAIL,
    "ipv4network": _V4_NETWORK,
    "ipv6network": _V6_NETWORK,
    "ipv4interface": _V4_INTERFACE,
    "ipv6interface": _V6_INTERFACE,
    "ipvanynetwork": f"{_V4_NETWORK}|{_V6_NETWORK}",
    "ipvanyinterface": f"{_V4_INTERFACE}|{_V6_INTERFACE}",
    "base64url": _BASE64URL,
}
"""Formats of pydantic's own that are read more strictly than others read them, or that nobody else knows."""


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

    These are dicts with numbers as keys, dates between bounds, timedeltas, complex numbers, decimals, bytes, networks,
    addresses of mail and URLs.
    """

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        described = super().generate_inner(schema)
        name = described.get("format", "")
        reads_any = schema["type"] == "str"  # a string with the format of pydantic's type
        if name not in _PATTERNS or "pattern" in described or reads_any:
            return described
        others = {key: value for key, value in described.items() if key != "format" or name not in FORMATS}
        return {**others, "pattern": f"^({_PATTERNS[name]})$"}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        described = super().dict_schema(schema)
        keys: Any = schema.get("keys_schema", {})
        if keys.get("type") == "nullable":  # no name of a member is None
            keys = keys["schema"]
        pattern = _KEYS.get(keys.get("type"))
        if pattern == INTEGER:
            low, high = _bounds(keys, 1)
            if low is not None or high is not None:
                pattern = integer_pattern(low, high)
        return described if pattern is None else {**described, "propertyNames": {"pattern": f"^({pattern})$"}}

    def date_schema(self, schema: core_schema.DateSchema) -> JsonSchemaValue:
        described = super().date_schema(schema)
        try:
            low, high = _bounds(schema, timedelta(days=1))
        except OverflowError:  # before the first day, or after the last
            return described
        if low is None and high is None or (low or date.min) > (high or date.max):
            return described
        pattern = between_pattern(str(low or date.min), str(high or date.max))
        return {**described, "pattern": f"^{pattern}$"}

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        described = super().datetime_schema(schema)
        naive = schema.get("tz_constraint") == "naive"
        return {"type": "string", "pattern": f"^{_NAIVE}$"} if naive else described

    def timedelta_schema(self, schema: core_schema.TimedeltaSchema) -> JsonSchemaValue:
        pattern, zero = f"-?{_DURATION}", timedelta(0)
        if (above := schema.get("gt")) is not None and above >= zero:
            pattern = _POSITIVE_DURATION
        elif (least := schema.get("ge")) is not None and least >= zero:
            pattern = _DURATION
        return {"type": "string", "pattern": f"^({pattern})$"}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        described = super().bytes_schema(schema)
        match self._config.val_json_bytes:
            case "hex":
                lengths: JsonSchemaValue = {
                    name: 2 * described[name] for name in ("minLength", "maxLength") if name in described
                }
                return {**described, **lengths, "pattern": "^([0-9a-fA-F]{2})*$"}
            case "base64":
                return {**described, "pattern": f"^({_BASE64URL}|{_BASE64URL.replace('=', '')})$"}
        if "maxLength" not in described:
            return described
        ascii_alone = {"pattern": r"^[\x00-\x7f]*$"}
        return {**described, "anyOf": [ascii_alone, {"maxLength": described["maxLength"] // 4}]}  # of 4 bytes each

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{_COMPLEX}$"}

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """A number: pydantic's own also admits any string."""
        values: dict[str, Any] = {**schema}
        bounds = [name for name in ("multiple_of", "le", "ge", "lt", "gt") if values.get(name) is not None]
        given: dict[str, Any] = {name: float(values[name]) for name in bounds}
        number = self.float_schema(core_schema.float_schema(**given))
        digits, places = schema.get("max_digits"), schema.get("decimal_places")
        if digits is not None and (places is None or places <= _MAX_DIGITS):
            digits = min(digits, _MAX_DIGITS)
        if places is None and digits is None:
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


def _bounds(schema: Mapping[str, Any], step: Any) -> tuple[Any, Any]:
    """The least and the largest value of a schema whose values are `step` apart; None where it has no bound."""
    lows = [schema["ge"]] if schema.get("ge") is not None else []
    highs = [schema["le"]] if schema.get("le") is not None else []
    if schema.get("gt") is not None:
        lows.append(schema["gt"] + step)
    if schema.get("lt") is not None:
        highs.append(schema["lt"] - step)
    return max(lows, default=None), min(highs, default=None)


def integer_pattern(low: int | None = None, high: int | None = None) -> str:
    """Return a pattern of the integers from `low` to `high`, both included, as JSON writes them.

    Integers without a bound have at most 18 digits. The pattern matches nothing if `high` is below `low`.
    """
    largest = 10**_MOST_DIGITS - 1
    low, high = max(-largest, -largest if low is None else low), min(largest, largest if high is None else high)
    ways = [f"-({_naturals(max(1, -high), -low)})"] if low < 0 and low <= high else []
    if high >= max(low, 0):
        ways.append(_naturals(max(low, 0), high))
    return "|".join(ways) or "[^\\s\\S]"


def between_pattern(low: str, high: str) -> str:
    """Return a pattern of the texts from `low` to `high`, which are equally long and differ in digits only."""
    if low == high:
        return re.escape(low)
    if low[0] == high[0]:
        return re.escape(low[0]) + between_pattern(low[1:], high[1:])
    least, most = re.sub("[0-9]", "0", low[1:]), re.sub("[0-9]", "9", high[1:])
    first, last = int(low[0]) + (low[1:] != least), int(high[0]) - (high[1:] != most)
    ways = [low[0] + between_pattern(low[1:], most)] if low[1:] != least else []
    if first <= last:
        ways.append((f"[{first}-{last}]" if first < last else str(first)) + _any(low[1:]))
    if high[1:] != most:
        ways.append(high[0] + between_pattern(least, high[1:]))
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def _naturals(low: int, high: int) -> str:
    ways = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        ways.append(between_pattern(str(first), str(last)))
    return "|".join(ways)


def _any(text: str) -> str:
    return "".join("[0-9]" if char.isdigit() else re.escape(char) for char in text)
