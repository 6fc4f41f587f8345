"""Batch: a program run over many items at the same time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from graftlm.core.errors import GraftError
from graftlm.core.program.run import Run
from graftlm.core.program.state import ProgramState
from graftlm.core.program.trace import BatchGate


class Prepare(Protocol):
    """Makes the run of one item; raises what is wrong with the item."""

    def __call__(self, item: Any, /, *, gate: BatchGate) -> tuple[Run, Callable[[], Any]]: ...


class Batch:
    """Starts all items; `finish` waits for them.

    new_run  makes the run of an item that could not be prepared, to hold its error.
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
        if calls:
            threads = ThreadPoolExecutor(min(max_concurrency, len(calls)), thread_name_prefix="graftlm batch")
            for run, function in calls:
                threads.submit(contextvars.copy_context().run, run.execute, function)
            threads.shutdown(wait=False)

    @property
    def states(self) -> list[ProgramState]:
        return [ProgramState(run.root) for run in self._runs]

    def finish(self) -> None:
        """Let the items' first calls go together, and wait until all items have come to rest."""
        if not self._runs:
            return
        pin = self._gate.pass_all(self._runs[0].backend, self._runs[0].interpreter)
        try:
            for run in self._runs:
                run.when_at_rest().result()
        finally:
            if pin is not None:
                pin.unpin()

    def finishing(self) -> Future[None]:
        """A future of `finish`, which runs on a thread of its own."""
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
        """End all calls of all items."""
        for run in self._runs:
            run.cancel()
