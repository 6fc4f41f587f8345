"""Bounds of moments and durations: kept, or refused."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

import pytest
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    Field,
    FutureDate,
    FutureDatetime,
    NaiveDatetime,
    PastDate,
    PastDatetime,
)

from graftlm.core.errors import GrammarError
from tests.core.grammar.python_types.sampling import admits, assert_read, texts_of

HOUR = datetime.timedelta(hours=1)
NOON = datetime.datetime(2020, 1, 2, 12, 30, 15, 250)
UTC_NOON = NOON.replace(tzinfo=datetime.UTC)
EAST = NOON.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30)))
LAST = datetime.datetime.max

DATETIME_BOUNDS: list[dict[str, Any]] = [
    {"ge": NOON},
    {"lt": NOON},
    {"gt": NOON, "le": NOON + 40 * HOUR},
    {"gt": NOON, "lt": NOON + datetime.timedelta(microseconds=9)},
    {"ge": UTC_NOON},
    {"gt": UTC_NOON, "lt": UTC_NOON + HOUR},
    {"le": EAST},
]


@pytest.mark.parametrize("bounds", DATETIME_BOUNDS, ids=str)
@pytest.mark.parametrize("kind", [datetime.datetime, NaiveDatetime, AwareDatetime], ids=str)
def test_bounds_of_datetimes_which_used_to_be_dropped_hold(kind: Any, bounds: dict[str, Any]) -> None:
    assert_read(Annotated[kind, Field(**bounds)])


@pytest.mark.parametrize(
    "bounds",
    [
        {"ge": datetime.time(1, 2, 3)},
        {"lt": datetime.time(1, 2, 3, 4)},
        {"gt": datetime.time(1), "lt": datetime.time(2)},
        {"ge": datetime.time(1, tzinfo=datetime.UTC)},
    ],
)
def test_bounds_of_times_which_used_to_be_dropped_hold(bounds: dict[str, Any]) -> None:
    assert_read(Annotated[datetime.time, Field(**bounds)])


@pytest.mark.parametrize(
    "bounds",
    [
        {"ge": HOUR},
        {"lt": 0 * HOUR},
        {"le": 48 * HOUR},
        {"gt": HOUR / 3600, "lt": HOUR / 1200},
        {"ge": -5 * HOUR, "le": 5 * HOUR},
        {"gt": 0 * HOUR, "lt": HOUR / 3600},
        {"ge": datetime.timedelta(microseconds=5)},
    ],
)
def test_bounds_of_durations_which_used_to_be_dropped_hold(bounds: dict[str, Any]) -> None:
    assert_read(Annotated[datetime.timedelta, Field(**bounds)])


def test_a_second_used_to_pass_for_an_hour_and_ordinary_durations_stay() -> None:
    kind = Annotated[datetime.timedelta, Field(ge=HOUR)]
    assert not admits(kind, "PT1S")
    assert all(admits(kind, text) for text in ("PT1H", "PT5H30M", "P3D", "P1DT1S", "P2DT3H4M5S"))


def test_the_bound_of_a_datetime_is_a_bound_and_the_next_moment_passes() -> None:
    kind = Annotated[NaiveDatetime, Field(gt=datetime.datetime(2020, 1, 2, 3, 4, 5))]
    assert not admits(kind, "2020-01-02T03:04:05")
    assert admits(kind, "2020-01-02T03:04:06") and admits(kind, "2020-01-02T03:04:05.000001")


@pytest.mark.parametrize(
    "kind",
    [
        Annotated[datetime.date, Field(gt=datetime.date.max)],
        Annotated[datetime.date, Field(ge=datetime.date(2022, 1, 1), le=datetime.date(2021, 1, 1))],
        Annotated[datetime.datetime, Field(gt=LAST)],
        Annotated[datetime.time, Field(lt=datetime.time(0))],
        Annotated[datetime.timedelta, Field(gt=HOUR, lt=HOUR)],
    ],
)
def test_bounds_without_a_value_between_them_used_to_be_dropped(kind: Any) -> None:
    with pytest.raises(GrammarError, match="nothing can satisfy"):
        texts_of(kind, 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Annotated[datetime.timedelta, Field(multiple_of=HOUR)], "multiples of 1:00:00"),
        (Annotated[datetime.datetime, Field(ge=NOON, le=UTC_NOON)], "with and without a time zone"),
    ],
)
def test_bounds_that_no_pattern_holds_are_refused_at_their_place(kind: Any, reason: str) -> None:
    class Meeting(BaseModel):
        when: kind

    with pytest.raises(GrammarError, match=reason) as caught:
        texts_of(Meeting, 1)
    assert caught.value.pointer == "/properties/when"


@pytest.mark.parametrize("kind", [PastDate, FutureDate, PastDatetime, FutureDatetime], ids=str)
def test_past_and_future_used_to_admit_any_moment(kind: Any) -> None:
    assert_read(kind)


def test_yesterday_is_past_and_the_day_after_tomorrow_is_future() -> None:
    today = datetime.date.today()
    assert admits(PastDate, str(today - datetime.timedelta(days=1))) and not admits(PastDate, str(today))
    assert admits(FutureDate, str(today + datetime.timedelta(days=2))) and not admits(FutureDate, str(today))


@pytest.mark.parametrize(
    "kind",
    [
        Annotated[datetime.timedelta, AfterValidator(lambda duration: duration), Field(gt=HOUR)],
        Annotated[datetime.date, AfterValidator(lambda day: day), Field(gt=datetime.date(2020, 1, 1))],
        Annotated[datetime.datetime, AfterValidator(lambda moment: moment), Field(gt=NOON)],
        Annotated[datetime.datetime, AfterValidator(lambda moment: moment), Field(gt=UTC_NOON)],
        Annotated[datetime.date | None, Field(gt=datetime.date(2020, 1, 1))],
    ],
)
def test_bounds_behind_a_validator_used_to_be_dropped(kind: Any) -> None:
    assert_read(kind)
