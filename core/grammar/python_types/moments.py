"""Dates, times, datetimes and durations, with their bounds as patterns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from graftlm.core.grammar.python_types.range_patterns import (
    LONGEST,
    between_pattern,
    duration_patterns,
    moment_pattern,
    time_pattern,
)
from graftlm.core.grammar.python_types.refusals import NOTHING, refused
from graftlm.core.grammar.schema.algebra.formats import FORMATS

_TIME: Final = "[0-9]{1,4}H([0-9]{1,4}M)?([0-9]{1,4}S)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S"
_DURATION: Final = rf"P([0-9]{{1,6}}D(T({_TIME}))?|T({_TIME}))"
_POSITIVE_TIME: Final = re.sub(r"(^|\|)\[0-9\]\{1,4\}", r"\1[1-9][0-9]{0,3}", _TIME)
_POSITIVE_DURATION: Final = rf"P([1-9][0-9]{{0,5}}D(T({_TIME}))?|T({_POSITIVE_TIME}))"
_NAIVE_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_NAIVE: Final = rf"({FORMATS['date']})T{_NAIVE_TIME}"
_ZONE: Final = r"([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_MARGIN: Final = timedelta(hours=1)
_TICK: Final = timedelta(microseconds=1)
_MIXED: Final = (
    "bounds with and without a time zone, or in several zones, cannot be kept together; give all of them in one zone, "
    "or use on_unsupported='warn'"
)


def limits(schema: Mapping[str, Any], step: Any) -> tuple[Any, Any]:
    """Return the least and the largest value of a schema whose values are `step` apart; None where it has no bound.

    Raises: OverflowError if a bound excludes every value of its type.
    """
    lows = [schema["ge"]] if schema.get("ge") is not None else []
    highs = [schema["le"]] if schema.get("le") is not None else []
    if schema.get("gt") is not None:
        lows.append(schema["gt"] + step)
    if schema.get("lt") is not None:
        highs.append(schema["lt"] - step)
    return max(lows, default=None), min(highs, default=None)


def date_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    described = GenerateJsonSchema.date_schema(generator, schema)
    bounds = {name: _as_date(schema[name]) for name in ("gt", "ge", "lt", "le") if schema.get(name) is not None}
    try:
        low, high = limits(bounds, timedelta(days=1))
    except OverflowError:  # before the first day, or after the last
        return {**described, **NOTHING}
    if (now := schema.get("now_op")) == "past":
        high = min(high or date.max, date.today() - timedelta(days=1))
    elif now == "future":  # still in the future when the text is read, up to an hour later
        low = max(low or date.min, (datetime.now() + _MARGIN).date() + timedelta(days=1))
    if low is None and high is None:
        return described
    low, high = low or date.min, high or date.max
    return (
        {**described, **NOTHING}
        if low > high
        else {**described, "pattern": f"^{between_pattern(str(low), str(high))}$"}
    )


def _as_date(bound: date) -> date:
    return bound.date() if isinstance(bound, datetime) else bound


def datetime_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    naive = schema.get("tz_constraint") == "naive"
    described = GenerateJsonSchema.datetime_schema(generator, schema)
    if naive:
        described = {"type": "string", "pattern": f"^{_NAIVE}$"}
    bounds = {name: _as_datetime(schema[name]) for name in ("gt", "ge", "lt", "le") if schema.get(name) is not None}
    now = schema.get("now_op")
    if isinstance(offset := schema.get("tz_constraint"), int):
        described = {**described, "allOf": [{"pattern": f"{_spelled(timedelta(seconds=offset))}$"}]}
    if not bounds and now is None:
        return described
    zone = _common_zone(bounds)
    if zone is _Several or (now is not None and bounds and (zone is None) != naive):
        return refused(described, _MIXED)
    if now is not None:
        zone = None if naive else zone or UTC
        _bound_by_now(bounds, now, datetime.now(zone))
    try:
        low, high = limits(bounds, _TICK)
    except OverflowError:
        return {**described, **NOTHING}
    low, high = (low or datetime.min).replace(tzinfo=None), (high or datetime.max).replace(tzinfo=None)
    pattern = f"({moment_pattern(low, high)}){_zone_after(zone, naive)}"
    return {**described, "allOf": [*described.get("allOf", []), {"pattern": f"^{pattern}$"}]}


def _bound_by_now(bounds: dict[str, Any], direction: str, now: datetime) -> None:
    """Add the bound of a moment in the past or in the future: one an hour, which holds for an hour or more."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    if direction == "past":
        bounds["lt"] = min(hour, bounds.get("lt", hour))
    else:
        later = hour + 2 * _MARGIN
        bounds["gt"] = max(later, bounds.get("gt", later))


def _as_datetime(bound: date) -> datetime:
    return bound if isinstance(bound, datetime) else datetime.combine(bound, time())


class _Several(tzinfo):
    """A mark: bounds of more than one zone."""


def _common_zone(bounds: dict[str, Any]) -> Any:
    """Return the zone of all bounds, None if none has one, or `_Several`."""
    offsets = {bound.utcoffset() for bound in bounds.values()}
    if len(offsets) > 1:
        return _Several
    offset = offsets.pop() if offsets else None
    return None if offset is None else timezone(offset)


def _zone_after(zone: tzinfo | None, naive: bool) -> str:
    """Return a pattern of the offsets that texts may have.

    pydantic compares a text without an offset, and any text with a bound that has none, by the written digits. Two
    offsets are compared in UTC: texts then have the offset of the bound.
    """
    if naive:
        return ""
    return _ZONE if zone is None else _spelled(zone.utcoffset(None) or timedelta(0))


def _spelled(offset: timedelta) -> str:
    minutes = round(abs(offset).total_seconds() / 60)
    sign = "-" if offset < timedelta(0) else r"\+"
    return rf"{sign}{minutes // 60:02}:{minutes % 60:02}" if minutes else r"([zZ]|\+00:00)"


def time_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    described = GenerateJsonSchema.time_schema(generator, schema)
    naive = schema.get("tz_constraint") == "naive"
    if naive:
        described = {"type": "string", "pattern": f"^{_NAIVE_TIME}$"}
    bounds = {name: schema[name] for name in ("gt", "ge", "lt", "le") if schema.get(name) is not None}
    if not bounds:
        return described
    zone = _common_zone(bounds)
    if zone is _Several:
        return refused(described, _MIXED)
    day = datetime(2000, 1, 1)
    moments = {name: datetime.combine(day, bound.replace(tzinfo=None)) for name, bound in bounds.items()}
    low, high = limits(moments, _TICK)
    low, high = low or day, high or datetime.combine(day, time.max)
    if low.date() != day.date() or high.date() != day.date():
        return {**described, **NOTHING}
    pattern = f"({time_pattern(low.time(), high.time())}){_zone_after(zone, naive)}"
    return {**described, "allOf": [{"pattern": f"^{pattern}$"}]}


def timedelta_schema(generator: GenerateJsonSchema, schema: Any) -> JsonSchemaValue:
    zero = timedelta(0)
    try:
        low, high = limits(schema, _TICK)
    except OverflowError:
        return {"type": "string", **NOTHING}
    if high is None and low in (None, zero, _TICK):  # any spelling
        pattern = f"-?{_DURATION}" if low is None else _DURATION if low == zero else _POSITIVE_DURATION
        described: JsonSchemaValue = {"type": "string", "pattern": f"^({pattern})$"}
    else:
        spelled, inside = duration_patterns(
            -LONGEST if low is None else max(low, -LONGEST), LONGEST if high is None else min(high, LONGEST)
        )
        described = {"type": "string", "pattern": f"^({spelled})$", "allOf": [{"pattern": f"^({inside})$"}]}
    if schema.get("multiple_of") is not None:
        reason = f"durations that are multiples of {schema['multiple_of']} cannot be kept; use an int of such units"
        return refused(described, reason)
    return described
