"""A model of optimum-intel behind a framework's class for models in the process."""

from __future__ import annotations

import threading
from typing import Any


def one_call_at_a_time(model: Any) -> None:
    """Let the threads of a framework's batch wait for one another in `generate`: OpenVINO refuses two calls at once."""
    lock, generate = threading.Lock(), model.generate

    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return generate(*arguments, **options)

    model.generate = locked
