"""SharedRuntimes: the runtimes of a process that `Runtime.shared` hands out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftlm.core.runtime import Runtime


class SharedRuntimes:
    """Runtimes by their key, each held until it is closed. A forked child starts without any."""

    def __init__(self) -> None:
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self._runtimes: dict[Hashable, Runtime] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Runtime]) -> Runtime:
        """Return the open runtime with `key`, made if there is none."""
        with self._lock:
            self._runtimes = {known: runtime for known, runtime in self._runtimes.items() if not runtime.closed}
            if key not in self._runtimes:
                self._runtimes[key] = make()
            return self._runtimes[key]

    def forget(self, closed: Runtime) -> None:
        """Drop a closed runtime, so that its model is freed."""
        with self._lock:
            self._runtimes = {key: runtime for key, runtime in self._runtimes.items() if runtime is not closed}
