"""The tree of GraftLM's errors.

    GraftError
    ├── ConfigError          an option or argument is unknown, out of range or contradictory
    ├── ModelError           a model or tokenizer cannot be found, read or run
    ├── GrammarError         a constraint cannot be parsed, satisfied or kept exactly
    ├── RequestTooLong       prompt or prompt + max_tokens exceed the context or the pool
    ├── RequestCancelled     the caller cancelled the request
    ├── RequestTimeout       `timeout` passed before the request finished
    ├── EngineError          a step failed, or the runtime is closed
    ├── RemoteError          an endpoint answered with an error, with nothing usable, or not at all
    │   └── RemoteTooLong    the request exceeds its context; a RequestTooLong as well
    └── PluginError          a plugin is broken, or a name it offers is taken or unknown

Each message names the value, the limit and the remedy.
"""

from __future__ import annotations

from typing import Any


class GraftError(Exception):
    """Base of all errors raised by GraftLM. They can be pickled, whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[GraftError], args: tuple[Any, ...], attributes: dict[str, Any]) -> GraftError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(GraftError, ValueError):
    """An option or argument is unknown, out of range or contradictory."""


class ModelError(GraftError):
    """A model or tokenizer cannot be found, read or run."""


class GrammarError(GraftError, ValueError):
    """A constraint cannot be parsed, satisfied or kept exactly.

    `pointer` is the JSON pointer into a schema ("" for the root) and `position` the character
    offset into a pattern or grammar text; each is None where it does not apply.
    """

    def __init__(self, message: str, *, pointer: str | None = None, position: int | None = None) -> None:
        super().__init__(message)
        self.pointer = pointer
        self.position = position


class Overloaded(GraftError):
    """Too much work of one kind waits already; the same request may succeed later."""


class RequestTooLong(GraftError):
    """A request exceeds the context or the KV pool.

    `length` and `limit` are in tokens; None where an endpoint does not state them.
    """

    def __init__(self, message: str, *, length: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.length = length
        self.limit = limit


class RequestCancelled(GraftError):
    """The caller cancelled the request; its KV slots are free again."""


class RequestTimeout(GraftError, TimeoutError):
    """The request's `timeout` passed before it finished; its KV slots are free again."""


class EngineError(GraftError):
    """A step failed, or the runtime is closed."""


class RemoteError(GraftError):
    """An endpoint answered with an error, with nothing usable, or not at all.

    status         the HTTP status, if there was one.
    code           the endpoint's own name of the error, if it gave one ("insufficient_quota").
    retry_after_s  seconds that the endpoint asks to wait before a retry.
    transient      whether the same request may succeed later: after a rate limit, a server's error, a lost connection.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        transient: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.transient = transient


class RemoteTooLong(RemoteError, RequestTooLong):
    """An endpoint says that the request exceeds the context of its model."""

    length: int | None = None
    limit: int | None = None


class PluginError(GraftError):
    """A plugin is broken, or a name it offers is taken or unknown."""


def failure_of(error: BaseException) -> GraftError:
    """Return the error that ends a request: a GraftError unchanged, any other error as the cause of an EngineError."""
    if isinstance(error, GraftError):
        return error
    failure = EngineError(f"the request's own grammar, matcher or tokenizer failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def shortened(value: Any, most: int = 100) -> str:
    """Return the text of a value for a message, `most` characters of it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."
