"""Run: one call of a program, from its start until all its branches have come to rest."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from graftlm.core.errors import RequestCancelled
from graftlm.core.program.branch import Branch
from graftlm.core.program.interpreter import Backend, Call, interpreter

if TYPE_CHECKING:
    from graftlm.core.program.trace import BatchGate
    from graftlm.core.request import Chunk

_current: contextvars.ContextVar[Run | None] = contextvars.ContextVar("graftlm_run", default=None)


def current_run() -> Run | None:
    """The run whose program is being executed here, if any."""
    return _current.get()


class Run:
    """What the branches of one call share.

    changed   guards the branches' queues and variables, and wakes who waits for them.
    defaults  sampling parameters of calls that do not set them.
    sink      is given every chunk that is generated; None generates without chunks.
    gate      holds the first calls of a batch until all of its items have made theirs.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        defaults: Mapping[str, Any],
        sink: Callable[[Chunk], None] | None = None,
        gate: BatchGate | None = None,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        self.backend = backend
        self.defaults = defaults
        self.sink = sink
        self.gate = gate
        self.num_api_spec_tokens = num_api_spec_tokens
        self.interpreter = interpreter()
        self.outer = current_run()
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None  # the first of the run, of whichever branch
        self.raised: BaseException | None = None  # by the program's own code
        self.result: Any = None
        self.returned = False
        self.cancelled = False
        self._calls: set[Future[Any]] = set()
        self._inner: list[Run] = []
        self._waiters: list[Future[None]] = []
        self.root = Branch(self)
        if self.outer is not None:
            with self.outer.changed:
                self.outer._inner.append(self)

    def execute(self, function: Callable[[], Any]) -> None:
        """Run the program's own code here, to its end."""
        token = _current.set(self)
        try:
            if self.cancelled:
                raise RequestCancelled("the program was cancelled")
            _ = self.backend.tokenizer  # read from disk here, if at all, and not on the interpreter's thread
            self.result = function()
        except BaseException as error:
            self.fail(error)
        finally:
            _current.reset(token)
            self.end()

    def end(self) -> None:
        """The program's own code has returned; branches may still be busy."""
        with self.changed:
            self.returned = True
            self.rest()

    def fail(self, error: BaseException) -> None:
        """The program's own code has raised."""
        self.raised = error
        self.note(error)

    def note(self, error: BaseException) -> None:
        """Keep the first error of the run."""
        with self.changed:
            if self.error is None:
                self.error = error

    def cancel(self) -> None:
        """End every call of this run and of the programs it has started; readers get RequestCancelled."""
        with self.changed:
            self.cancelled = True
            calls, inner = list(self._calls), list(self._inner)
        for future in calls:
            future.cancel()
        for run in inner:
            run.cancel()

    # -- for branches ------------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        """Hand a call over, or to the gate of the batch while that is closed. On the interpreter's thread."""
        if self.gate is None or not self.gate.hold(self, call):
            self.interpreter.call(call)

    def begin_call(self, future: Future[Any]) -> None:
        with self.changed:
            self._calls.add(future)
            cancelled = self.cancelled
        if cancelled:
            future.cancel()

    def end_call(self, future: Future[Any]) -> None:
        with self.changed:
            self._calls.discard(future)

    # -- waiting -----------------------------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether the program's code has returned and no branch has anything left to do."""
        return self.returned and self.root.num_busy == 0

    def inside(self) -> bool:
        """Whether the caller is this run's own code or that of a program it has started, so must not wait for it."""
        run = current_run()
        while run is not None:
            if run is self:
                return True
            run = run.outer
        return False

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until `condition`, which is asked after every change; False if `timeout` seconds passed before."""
        with self.changed:
            return self.changed.wait_for(condition, timeout)

    def when_at_rest(self) -> Future[None]:
        """A future that is resolved when the run has come to rest."""
        future: Future[None] = Future()
        with self.changed:
            if not self.at_rest:
                self._waiters.append(future)
                return future
        future.set_result(None)
        return future

    def rest(self) -> None:
        """Tell who waits, if the run has come to rest. Under `changed`."""
        if not self.at_rest:
            return
        self.changed.notify_all()
        if self.gate is not None:
            self.gate.leave(self)
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
