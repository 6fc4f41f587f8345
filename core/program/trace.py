"""What the calls of a batch have in common, found on the calls themselves: no code is run to find out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from graftlm.core.program.interpreter import Call, Interpreter
    from graftlm.core.program.run import Run

MIN_PREFIX = 16
"""Tokens below which a common prefix is not worth a request of its own."""

_PATIENCE_S = 0.02  # an item that has not called the model this long after the others is not waited for


def common_prefix(prompts: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    """The longest prefix of all `prompts`, int32 [num_tokens]; empty for none."""
    prefix: np.ndarray | None = None
    for prompt in prompts:
        ids = np.asarray(prompt, dtype=np.int32)
        if prefix is None:
            prefix = ids
            continue
        length = min(len(prefix), len(ids))
        different = np.flatnonzero(prefix[:length] != ids[:length])
        prefix = prefix[: different[0] if len(different) else length]
    return prefix if prefix is not None else np.zeros(0, dtype=np.int32)


class BatchGate:
    """Holds the first calls of a batch's items until all are there, so that their common prefix is computed once.

    Items whose code is still at something else are not waited for long; the gate then opens without them.
    """

    def __init__(self) -> None:
        self._missing = 0
        self._changed = threading.Condition()
        self._arrived: set[int] = set()
        self._held: list[Call] = []
        self._open = False

    def expect(self, num_runs: int) -> None:
        """So many items will come, before or after this."""
        with self._changed:
            self._missing += num_runs

    def hold(self, run: Run, call: Call) -> bool:
        """Keep a call until the gate opens; False if it is open."""
        with self._changed:
            if self._open:
                return False
            self._held.append(call)
            self._arrive(run)
            return True

    def leave(self, run: Run) -> None:
        """This item has come to rest; it will make no call."""
        with self._changed:
            self._arrive(run)

    def pass_all(self, backend: Any, interpreter: Interpreter) -> Any:
        """Wait for the items, compute what their calls begin with, let them go.

        Returns a handle that keeps the prefix in the cache until its `unpin()`, or None.
        """
        try:
            prompts = self._wait()
            prefix = common_prefix(prompts)
            return backend.warm(prefix) if len(prompts) > 1 and len(prefix) >= MIN_PREFIX else None
        except Exception:
            return None  # whatever is wrong, each call will meet and report it itself
        finally:
            with self._changed:
                self._open = True
                held, self._held = self._held, []
            interpreter.post(partial(_call_all, interpreter, held))

    def _wait(self) -> list[np.ndarray]:
        """Wait until the items are there; the prompts of their calls."""
        with self._changed:
            while self._missing > 0:
                seen = self._missing
                self._changed.wait(_PATIENCE_S)
                if self._missing == seen and self._held:
                    break
            return [request.prompt for call in self._held for request in call.requests]

    def _arrive(self, run: Run) -> None:
        if id(run) not in self._arrived:
            self._arrived.add(id(run))
            self._missing -= 1
            self._changed.notify_all()


def _call_all(interpreter: Interpreter, calls: list[Call]) -> None:
    for call in calls:
        interpreter.call(call)
