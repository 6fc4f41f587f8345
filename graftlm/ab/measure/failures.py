"""Failures: an error described with its cause, errors that a framework logs, and errors that a user's file catches."""

from __future__ import annotations

import ast
import logging
import sys
import threading
from typing import Any

MAX_CHARS = 300
"""Characters of an error's own text that are shown; some hold answers of models."""


def told(error: BaseException) -> str:
    """Describe an error by type and text, and by those of its first cause."""
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


class _Noted:
    """Errors, each once, from any thread, until `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []

    def clear(self) -> None:
        with self._lock:
            self._errors = []

    def note(self, error: BaseException | None) -> None:
        with self._lock:
            if error is not None and all(error is not one for one in self._errors):
                self._errors.append(error)

    @property
    def errors(self) -> list[BaseException]:
        with self._lock:
            return list(self._errors)


class LoggedErrors(_Noted):
    """Errors that are logged where they are caught, by any logger, from when this object is made.

    DSPy's parallel executor logs the error of an input, and continues without that answer or raises an error of its own
    that names none. A record of level ERROR or above notes the exception that is being handled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._make = logging.getLogRecordFactory()
        logging.setLogRecordFactory(self._record)

    def told(self) -> str:
        """Return the number of errors and the first one; empty without any."""
        errors = self.errors
        num = f"{len(errors)} errors" if len(errors) > 1 else "1 error"
        return f"{num} logged, the first {told(errors[0])}" if errors else ""

    def _record(self, *args: Any, **options: Any) -> logging.LogRecord:
        record = self._make(*args, **options)
        if record.levelno >= logging.ERROR:
            self.note((record.exc_info or (None, None))[1] or sys.exception())
        return record


class CaughtErrors(_Noted):
    """Errors that the `except` clauses of one file catch: an engine that was never called looks fast."""

    NAME = "__graftlm_caught__"

    def watch(self, tree: ast.Module) -> dict[str, Any]:
        """Let every `except` clause of the tree note its error first. Returns the names that the file needs to run."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                call = ast.Expr(ast.Call(ast.Name(self.NAME, ast.Load()), [], []))
                node.body.insert(0, ast.copy_location(call, node))
        ast.fix_missing_locations(tree)
        return {self.NAME: lambda: self.note(sys.exception())}

    def told(self) -> list[str]:
        """Describe each error, in order."""
        return [told(error) for error in self.errors]
