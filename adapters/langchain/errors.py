"""GraftLM's errors as LangChain's: each class inherits from both, so that `except` clauses for either apply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as lc

from graftlm.core.errors import (
    ConfigError,
    EngineError,
    GraftError,
    GrammarError,
    ModelError,
    RemoteError,
    RemoteTooLong,
    RequestTimeout,
    RequestTooLong,
)


class GraftInvalidRequestError(ConfigError, lc.ModelInvalidRequestError):
    """An option, message or tool is unknown, out of range or contradictory."""


class GraftSchemaError(GrammarError, lc.ModelInvalidRequestError):
    """A schema or pattern is not supported exactly."""


class GraftContextOverflowError(RequestTooLong, lc.ContextOverflowError):
    """The conversation, or it and `max_tokens`, exceed the context."""


class GraftRemoteContextOverflowError(RemoteTooLong, lc.ContextOverflowError):
    """The endpoint says that the conversation, or it and `max_tokens`, exceed the context."""


class GraftTimeoutError(RequestTimeout, lc.ModelTimeoutError):
    """`timeout` passed before the answer was complete."""


class GraftModelNotFoundError(ModelError, lc.ModelNotFoundError):
    """The model cannot be found, read or run."""


class GraftEngineError(EngineError, lc.ModelAPIError):
    """A step of the engine failed, or the runtime is closed."""

    is_retryable = False


class GraftAuthenticationError(RemoteError, lc.ModelAuthenticationError):
    """The endpoint refuses the key."""


class GraftPermissionDeniedError(RemoteError, lc.ModelPermissionDeniedError):
    """The key may not do this."""


class GraftRemoteNotFoundError(RemoteError, lc.ModelNotFoundError):
    """The endpoint has no such model, or no such path."""


class GraftRemoteInvalidRequestError(RemoteError, lc.ModelInvalidRequestError):
    """The endpoint refuses the request."""


class GraftRateLimitError(RemoteError, lc.ModelRateLimitError):
    """The endpoint asks to slow down."""


class GraftRemoteError(RemoteError, lc.ModelAPIError):
    """The endpoint failed, its answer is invalid, or its budget is spent."""


class GraftConnectionError(RemoteError, lc.ModelConnectionError):
    """The endpoint does not answer."""


_LOCAL: tuple[tuple[type[GraftError], type[GraftError]], ...] = (
    (RequestTooLong, GraftContextOverflowError),
    (RequestTimeout, GraftTimeoutError),
    (GrammarError, GraftSchemaError),
    (ConfigError, GraftInvalidRequestError),
    (ModelError, GraftModelNotFoundError),
    (EngineError, GraftEngineError),
)
_REMOTE: dict[int, type[GraftError]] = {
    401: GraftAuthenticationError,
    403: GraftPermissionDeniedError,
    404: GraftRemoteNotFoundError,
    429: GraftRateLimitError,
}


def as_langchain_error(error: GraftError) -> GraftError:
    """Return the error, with its message and attributes, as a class that inherits from LangChain's."""
    if isinstance(error, lc.LangChainException):
        return error
    kind = _remote_kind(error) if isinstance(error, RemoteError) else _local_kind(error)
    if kind is None:
        return error
    translated = kind.__new__(kind, *error.args)
    translated.args = error.args
    translated.__dict__.update(error.__dict__)
    if isinstance(error, RemoteError):
        translated.__dict__["is_retryable"] = error.transient  # a spent budget or quota stays spent
    return translated


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise GraftLM's errors from the block as LangChain's."""
    try:
        yield
    except GraftError as error:
        translated = as_langchain_error(error)
        if translated is error:
            raise
        raise translated from error


def _local_kind(error: GraftError) -> type[GraftError] | None:
    return next((kind for own, kind in _LOCAL if isinstance(error, own)), None)


def _remote_kind(error: RemoteError) -> type[GraftError]:
    if isinstance(error, RemoteTooLong):
        return GraftRemoteContextOverflowError
    if error.status is None:
        return GraftConnectionError if error.transient else GraftRemoteError
    if error.status in _REMOTE:
        return _REMOTE[error.status]
    return GraftRemoteInvalidRequestError if 400 <= error.status < 500 else GraftRemoteError
