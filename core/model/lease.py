"""Claim: one runtime at a time runs a loaded model: it puts faster modules into it and takes them out at its end."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

from graftlm.core.errors import ConfigError

_PATIENCE_S = 2.0  # for a runtime that nobody holds any more to end

_freed = threading.Condition()
_claimed: weakref.WeakSet[Any] = weakref.WeakSet()


class Claim:
    """A loaded model, claimed by who made this until `release`. Names and folders need no claim: each reads its own.

    Raises ConfigError where another runtime has the model and is not ending.
    """

    def __init__(self, model: Any) -> None:
        self._model = None if isinstance(model, str) or not hasattr(model, "forward") else model
        if self._model is None:
            return
        if self._model in _claimed:
            gc.collect()  # its runtime may be garbage
        with _freed:
            if not _freed.wait_for(lambda: self._model not in _claimed, _PATIENCE_S):
                raise ConfigError(
                    f"this {type(model).__name__} object is run by another Runtime already; use that one for both "
                    "(Runtime.shared(model) finds it), close it first, or load the model twice"
                )
            _claimed.add(self._model)

    def release(self) -> None:
        """Let others have the model. A second call does nothing."""
        with _freed:
            if self._model is not None:
                _claimed.discard(self._model)
                self._model = None
                _freed.notify_all()
