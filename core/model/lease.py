"""ModelLease: exclusive use of a loaded model by one runtime, which replaces modules in it until it is closed."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

from graftlm.core.errors import ConfigError

_TIMEOUT_S = 2.0
"""Seconds to wait for a runtime that is ending."""

_released = threading.Condition()
_leased: weakref.WeakSet[Any] = weakref.WeakSet()


class ModelLease:
    """Exclusive use of a loaded model until `release`; a runtime of a name or folder reads its own weights.

    Raises ConfigError if another runtime holds the model and does not release it in time.
    """

    def __init__(self, model: Any) -> None:
        self._model = None if isinstance(model, str) or not hasattr(model, "forward") else model
        if self._model is None:
            return
        if self._model in _leased:
            gc.collect()  # the runtime that holds it may be garbage
        with _released:
            if not _released.wait_for(lambda: self._model not in _leased, _TIMEOUT_S):
                raise ConfigError(
                    f"this {type(model).__name__} object is run by another Runtime already; use that one for both "
                    "(Runtime.shared(model) finds it), close it first, or load the model twice"
                )
            _leased.add(self._model)

    def release(self) -> None:
        """Release the model for other runtimes. A second call does nothing."""
        with _released:
            if self._model is not None:
                _leased.discard(self._model)
                self._model = None
                _released.notify_all()
