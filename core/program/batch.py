"""Batch: run a program over many items at the same time; the common prefix of their first prompts is computed once."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graftlm.core.errors import GraftError
from graftlm.core.program.run import Run
from graftlm.core.program.state import ProgramState

if TYPE_CHECKING:
    from graftlm.core.program.interpreter import Backend, Call, Interpreter

MIN_PREFIX_TOKENS = 16
"""Shortest common prefix, in tokens, that is computed by a request of its own."""

_GATE_TIMEOUT_S = 0.02
"""Seconds without a further first call after which the gate opens."""


class Prepare(Protocol):
    """A factory of one item's run. Raises: GraftError if the item's arguments are wrong."""

    def __call__(self, item: Any, /, *, gate: BatchGate) -> tuple[Run, Callable[[], Any]]: ...


class Batch:
    """The runs of all items, started on construction; `finish` waits for them.

    new_run  makes an empty run, to hold the error of an item that could not be prepared.
    """

    def __init__(self, items: list[Any], prepare: Prepare, new_run: Callable[..., Run], max_concurrency: int) -> None:
        self._runs: list[Run] = []
        self._gate = BatchGate()
        calls: list[tuple[Run, Callable[[], Any]]] = []
        for item in items:
            try:
                run, function = prepare(item, gate=self._gate)
                calls.append((run, function))
            except GraftError as error:
                run = new_run()
                run.fail(error)
                run.end()
            self._runs.append(run)
        self._gate.expect(len(calls))
        try:
            _execute(calls, max_concurrency)
        except BaseException:  # an interrupt: the items' results are not read
            self.cancel()
            if calls:
                self._gate.release(self._runs[0].interpreter)
            raise

    @property
    def states(self) -> list[ProgramState]:
        return [ProgramState(run.root) for run in self._runs]

    def finish(self) -> None:
        """Submit the items' first calls together, then wait until all items are done."""
        if not self._runs:
            return
        self._runs[0].check_may_wait("batch()")
        pin = self._gate.open(self._runs[0].backend, self._runs[0].interpreter)
        try:
            for run in self._runs:
                run.when_done().result()
        finally:
            if pin is not None:
                pin.unpin()

    def finishing(self) -> Future[None]:
        """Start `finish` on a new thread; return its future."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def finish() -> None:
            try:
                self.finish()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=finish, name="graftlm batch", daemon=True).start()
        return future

    def cancel(self) -> None:
        """Cancel all model calls of all items."""
        for run in self._runs:
            run.cancel()


def _execute(calls: Iterable[tuple[Run, Callable[[], Any]]], max_concurrency: int) -> None:
    """Run the programs' Python code on at most `max_concurrency` threads; return at once.

    The interpreter's exit does not wait for these threads, unlike the threads of a ThreadPoolExecutor: after Ctrl-C
    it would block until each program's own code returns.
    """
    waiting = deque((contextvars.copy_context(), *call) for call in calls)

    def work() -> None:
        while True:
            try:
                context, run, function = waiting.popleft()
            except IndexError:
                return
            context.run(run.execute, function)

    for number in range(min(max_concurrency, len(waiting))):
        try:
            threading.Thread(target=work, name=f"graftlm batch {number}", daemon=True).start()
        except RuntimeError:  # the system starts no more threads; the started ones do the work
            if number == 0:
                raise
            return


class BatchGate:
    """A barrier for the first model call of each item: opens once every item has made its call or ended.

    The common prefix is computed from these calls, so user code runs only once. The gate opens without
    items whose first call takes longer than `_GATE_TIMEOUT_S`.
    """

    def __init__(self) -> None:
        self._num_missing = 0
        self._changed = threading.Condition()
        self._arrived: set[int] = set()
        self._held: list[Call] = []
        self._is_open = False

    def expect(self, num_runs: int) -> None:
        """Announce items; they may have arrived already."""
        with self._changed:
            self._num_missing += num_runs

    def hold(self, run: Run, call: Call) -> bool:
        """Hold a call until the gate opens; return False if it is open."""
        with self._changed:
            if self._is_open:
                return False
            self._held.append(call)
            self._arrive(run)
            return True

    def leave(self, run: Run) -> None:
        """Count an item that has ended without a call."""
        with self._changed:
            self._arrive(run)

    def open(self, backend: Backend, interpreter: Interpreter) -> Any:
        """Wait for the items, compute the common prefix of their prompts, then submit all held calls.

        Returns a handle that keeps the prefix in the cache until its `unpin()`, or None.
        """
        try:
            prompts = self._wait()
            prefix = common_prefix(prompts)
            return backend.warm(prefix) if len(prompts) > 1 and len(prefix) >= MIN_PREFIX_TOKENS else None
        except Exception:
            return None  # each call raises the same error by itself
        finally:
            self.release(interpreter)

    def release(self, interpreter: Interpreter) -> None:
        """Submit all held calls, and hold no more."""
        with self._changed:
            self._is_open = True
            held, self._held = self._held, []
        interpreter.post(partial(interpreter.call_all, held))

    def _wait(self) -> list[np.ndarray]:
        """Wait for the items; return the prompts of their calls."""
        with self._changed:
            while self._num_missing > 0:
                seen = self._num_missing
                self._changed.wait(_GATE_TIMEOUT_S)
                if self._num_missing == seen and self._held:
                    break
            return [request.prompt.ids for call in self._held for request in call.requests]

    def _arrive(self, run: Run) -> None:
        if id(run) not in self._arrived:
            self._arrived.add(id(run))
            self._num_missing -= 1
            self._changed.notify_all()


def common_prefix(prompts: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    """Return the longest common prefix of `prompts`, int32 [num_tokens]; empty for no prompts."""
    first, *others = [np.asarray(prompt, dtype=np.int32) for prompt in prompts] or [np.zeros(0, dtype=np.int32)]
    length = len(first)
    for other in others:
        length = min(length, len(other))
        different = np.flatnonzero(first[:length] != other[:length])
        length = int(different[0]) if len(different) else length
    return first[:length]
