from __future__ import annotations

import pytest
from langchain_core import exceptions as lc

from graftlm.adapters.langchain.errors import as_langchain_error, langchain_errors
from graftlm.core.errors import (
    ConfigError,
    EngineError,
    GraftError,
    GrammarError,
    ModelError,
    RemoteError,
    RequestCancelled,
    RequestTimeout,
    RequestTooLong,
)


@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (ConfigError("x"), lc.ModelInvalidRequestError, False),
        (GrammarError("x", pointer="/a"), lc.ModelInvalidRequestError, False),
        (RequestTooLong("x", length=9, limit=8), lc.ContextOverflowError, False),
        (RequestTimeout("x"), lc.ModelTimeoutError, True),
        (ModelError("x"), lc.ModelNotFoundError, False),
        (EngineError("x"), lc.ModelAPIError, False),
        (RemoteError("x", status=401), lc.ModelAuthenticationError, False),
        (RemoteError("x", status=403), lc.ModelPermissionDeniedError, False),
        (RemoteError("x", status=404), lc.ModelNotFoundError, False),
        (RemoteError("x", status=422), lc.ModelInvalidRequestError, False),
        (RemoteError("x", status=429, transient=True), lc.ModelRateLimitError, True),
        (RemoteError("x", status=429, code="insufficient_quota"), lc.ModelRateLimitError, False),
        (RemoteError("x", status=503, transient=True), lc.ModelAPIError, True),
        (RemoteError("x", transient=True), lc.ModelConnectionError, True),
        (RemoteError("x"), lc.ModelAPIError, False),
    ],
)
def test_an_error_is_of_both_families_and_keeps_what_it_says(
    error: GraftError, kind: type[lc.ModelError], retryable: bool
) -> None:
    translated = as_langchain_error(error)
    assert isinstance(translated, kind) and isinstance(translated, type(error))
    assert str(translated) == "x" and translated.is_retryable == retryable
    assert vars(error).items() <= vars(translated).items()


def test_a_cancelled_request_stays_what_it_is() -> None:
    error = RequestCancelled("x")
    assert as_langchain_error(error) is error


def test_the_cause_is_the_error_that_was_raised_first() -> None:
    with pytest.raises(lc.ModelInvalidRequestError) as caught, langchain_errors():
        raise ConfigError("x")
    assert type(caught.value.__cause__) is ConfigError
