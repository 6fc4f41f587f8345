"""Errors as a reader of a report needs them: with their cause, and also where a framework keeps them to itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from graftlm.ab.measure.failures import MAX_CHARS, LoggedErrors, told


@pytest.fixture
def logged() -> Iterator[LoggedErrors]:
    before = logging.getLogRecordFactory()
    yield LoggedErrors()
    logging.setLogRecordFactory(before)


def raised(raiser: Callable[[], None]) -> Exception:
    try:
        raiser()
    except Exception as error:
        return error
    raise AssertionError


def refused() -> None:
    raise ConnectionRefusedError("port 9 is closed")


def wrapped() -> None:
    try:
        refused()
    except OSError as error:
        raise RuntimeError("Connection error.") from error


def replaced() -> None:
    try:
        wrapped()
    except RuntimeError:
        raise ValueError("no answer")  # noqa: B904 (a user's code)


def silent() -> None:
    try:
        refused()
    except OSError:
        raise ValueError("no answer") from None


@pytest.mark.parametrize(
    ("raiser", "expected"),
    [
        (refused, "ConnectionRefusedError: port 9 is closed"),
        (wrapped, "RuntimeError: Connection error.; first there was ConnectionRefusedError: port 9 is closed"),
        (replaced, "ValueError: no answer; first there was ConnectionRefusedError: port 9 is closed"),
        (silent, "ValueError: no answer"),
    ],
)
def test_the_first_error_is_told_with_the_last(raiser: Callable[[], None], expected: str) -> None:
    assert told(raised(raiser)) == expected


def test_a_long_text_is_cut() -> None:
    assert told(ValueError("a " * MAX_CHARS)) == "ValueError: " + "a " * (MAX_CHARS // 2) + " ..."


def test_an_error_that_is_logged_where_nobody_listens_is_noted_once(logged: LoggedErrors) -> None:
    logger = logging.getLogger("a_framework")
    logger.propagate = False
    for number in range(3):
        try:
            raise KeyError(number)
        except KeyError:
            logger.error("Item %d has no answer", number)
            logger.error("Set verbose=True for more")
    logger.error("no exception is being handled")
    assert logged.told() == "3 errors logged, the first KeyError: 0"
    logged.clear()
    assert logged.told() == ""


def test_warnings_are_no_errors(logged: LoggedErrors) -> None:
    try:
        raise KeyError("a cache misses it")
    except KeyError:
        logging.getLogger("a_framework").warning("asking again")
    assert logged.told() == ""
