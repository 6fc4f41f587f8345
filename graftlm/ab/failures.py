"""Failures: an error told with its cause, and errors that a framework logs and keeps to itself."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

MAX_CHARS = 300
"""So much of an error's own text is told; answers of models stand in some."""


def told(error: BaseException) -> str:
    """Type and text of an error, and those of the first one that led to it."""
    first = error
    seen = {id(error)}
    while (before := _before(first)) is not None and id(before) not in seen:
        first = before
        seen.add(id(first))
    own = _named(error)
    return own if first is error or str(first) in own else f"{own}; first there was {_named(first)}"


def _before(error: BaseException) -> BaseException | None:
    return error.__cause__ if error.__suppress_context__ or error.__cause__ else error.__context__


def _named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + ' ...'}"


class LoggedErrors:
    """Errors that are logged where they are caught, whatever logger it is and whoever listens to it.

    DSPy's parallel executor logs the error of an input, and goes on without that answer or raises an error of its own
    that names none. From when this object is made, each record of level ERROR or above that belongs to an exception
    is noted, until `clear`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._record)

    def clear(self) -> None:
        with self._lock:
            self._errors = []

    def told(self) -> str:
        """How many there were, and the first one; empty if there was none."""
        with self._lock:
            errors = list(self._errors)
        num = f"{len(errors)} errors" if len(errors) > 1 else "1 error"
        return f"{num} logged, the first {told(errors[0])}" if errors else ""

    def _record(self, *args: Any, **options: Any) -> logging.LogRecord:
        record = self._make(*args, **options)
        error = (record.exc_info or (None, None))[1] or sys.exception()
        if record.levelno >= logging.ERROR and error is not None:
            with self._lock:
                if all(error is not one for one in self._errors):
                    self._errors.append(error)
        return record
