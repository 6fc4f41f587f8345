"""Errors cross processes."""

from __future__ import annotations

import pickle

import pytest

from graftlm.core import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("x"),
        errors.GrammarError("x", pointer="/a", position=3),
        errors.RequestTooLong("x", length=9, limit=8),
        errors.RemoteError("x", status=429),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling_with_all_that_it_says(error: errors.GraftError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), "x", vars(error))
