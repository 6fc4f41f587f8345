"""Run: one execution of a program, from its start until all its branches are idle."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from graftlm.core.errors import RequestCancelled
from graftlm.core.program.branch import Branch
from graftlm.core.program.interpreter import Backend, Call, interpreter

if TYPE_CHECKING:
    from graftlm.core.program.batch import BatchGate
    from graftlm.core.program.expression import Expression, Text
    from graftlm.core.request import Chunk

_current: contextvars.ContextVar[Run | None] = contextvars.ContextVar("graftlm_run", default=None)


def current_run() -> Run | None:
    """Return the run of the program that the caller belongs to, if any."""
    return _current.get()


class Pacing(Protocol):
    """The order of a run's model calls in place of the order in which they become due.

    begin     the program's code starts, on the thread that runs it
    appended  an expression was queued in a branch. Under `run.changed`, on a thread of the program
    reads     code of a program waits for a value of the run; `name` is the method, such as "state['x']"
    call      a model call is due. On the interpreter's thread; the call must be submitted or answered later
    end       the program's code has returned and no branch is busy
    """

    def begin(self, run: Run) -> None: ...
    def appended(self, branch: Branch, part: Expression) -> None: ...
    def reads(self, run: Run, name: str) -> None: ...
    def call(self, branch: Branch, call: Call) -> None: ...
    def end(self, run: Run) -> None: ...


class PartOrder(Protocol):
    """The order of the parts of a compiled program.

    arrange  returns the text of adjacent texts and parts: the group with this number in the branch of this path
    """

    def arrange(self, group: tuple[tuple[int, ...], int], texts: Sequence[Text]) -> str: ...


def new_branch(run: Run) -> Branch:
    """Return the first branch of a run, of the kind that its backend needs."""
    if getattr(run.backend, "endpoint", None) is None:
        return Branch(run)
    from graftlm.core.remote.language.branch import RemoteBranch

    return RemoteBranch(run)


class Run:
    """The shared state of one execution's branches.

    changed   guards the branches' queues and variables, and wakes threads that wait for them.
    defaults  sampling parameters of model calls that do not set their own.
    on_chunk  is called with every generated chunk; None generates without streaming.
    gate      the barrier for the first model calls of a batch's items.
    pacing    decides when model calls are submitted; None submits each as soon as it is due.
    place     the path of the first branch: () for a run that no program started, else unique among its caller's.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        defaults: Mapping[str, Any],
        on_chunk: Callable[[Chunk], None] | None = None,
        gate: BatchGate | None = None,
        num_api_spec_tokens: int | None = None,
        pacing: Pacing | None = None,
        part_order: PartOrder | None = None,
    ) -> None:
        self.backend = backend
        self.defaults = defaults
        self.on_chunk = on_chunk
        self.gate = gate
        self.num_api_spec_tokens = num_api_spec_tokens
        self.interpreter = interpreter()
        self.outer = current_run()
        self.changed = threading.Condition(threading.RLock())
        self.error: BaseException | None = None  # the first error of any branch
        self.raised: BaseException | None = None  # by the program's Python code
        self.result: Any = None
        self.returned = False
        self.cancelled = False
        self._calls: set[Future[Any]] = set()
        self._inner: list[Run] = []
        self._waiters: list[Future[None]] = []
        self.num_reading = 0  # number of reads in which the program's Python code blocks
        self.place: tuple[int, ...] = ()
        if self.outer is not None:
            with self.outer.changed:
                self.outer._inner.append(self)
                self.place = (*self.outer.place, -len(self.outer._inner))
        self.pacing: Pacing | None = pacing or (self.outer.pacing if self.outer is not None else None)
        self.part_order = part_order
        self.root = new_branch(self)

    def execute(self, function: Callable[[], Any]) -> None:
        """Run the program's Python code on this thread."""
        token = _current.set(self)
        try:
            if self.cancelled:
                raise RequestCancelled("the program was cancelled")
            self.root.prepare()
            if self.pacing is not None:
                self.pacing.begin(self)
            self.result = function()
        except BaseException as error:
            self.fail(error)
        finally:
            _current.reset(token)
            self.end()

    def end(self) -> None:
        """Record that the program's Python code has returned; branches may still be busy."""
        with self.changed:
            self.returned = True
            self.notify_if_done()

    def fail(self, error: BaseException) -> None:
        """Record the error that the program's Python code raised."""
        self.raised = error
        self.record_error(error)

    def record_error(self, error: BaseException) -> None:
        """Keep the first error of the run."""
        with self.changed:
            if self.error is None:
                self.error = error

    def cancel(self) -> None:
        """Cancel every model call of this run and of the programs it started; readers get RequestCancelled."""
        with self.changed:
            self.cancelled = True
            calls, inner = list(self._calls), list(self._inner)
        for future in calls:
            future.cancel()
        for run in inner:
            run.cancel()

    # -- for branches ------------------------------------------------------------------------------------------

    def call(self, call: Call, branch: Branch) -> None:
        """Submit a model call, or hold it in the batch's closed gate. Runs on the interpreter's thread."""
        if self.pacing is not None:
            if self.gate is not None:
                self.gate.leave(self)
            self.pacing.call(branch, call)
        elif self.gate is None or not self.gate.hold(self, call):
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
    def done(self) -> bool:
        """True if the program's code has returned and every branch is idle."""
        return self.returned and self.root.num_busy == 0

    def inside(self) -> bool:
        """Return True if the caller is code of this run or of a nested program: waiting for the end would deadlock."""
        run = current_run()
        while run is not None:
            if run is self:
                return True
            run = run.outer
        return False

    def wait_for(self, condition: Callable[[], bool], name: str, timeout: float | None = None) -> bool:
        """Block until `condition()` is true; return False after `timeout` seconds. Tested after every change.

        Raises as `check_may_wait` if the wait would deadlock.
        """
        reading = int(current_run() is self)
        if self.pacing is not None and current_run() is not None:
            self.pacing.reads(self, name)
        with self.changed:
            if timeout is None and not condition():
                self.check_may_wait(name)
            self.num_reading += reading
            try:
                return self.changed.wait_for(condition, timeout)
            finally:
                self.num_reading -= reading

    def check_may_wait(self, name: str) -> None:
        """Raise EngineError on a thread that this run needs for its progress; `name` is the caller's method."""
        self.interpreter.check_may_wait(name)
        self.backend.check_may_wait(name)

    def when_done(self) -> Future[None]:
        """Return a future that is resolved when the run is done."""
        future: Future[None] = Future()
        with self.changed:
            if not self.done:
                self._waiters.append(future)
                return future
        future.set_result(None)
        return future

    def notify_if_done(self) -> None:
        """Wake the threads that wait for the end, if the run is done. Under `changed`."""
        if not self.done:
            return
        self.changed.notify_all()
        if self.gate is not None:
            self.gate.leave(self)
        if self.pacing is not None:
            self.pacing.end(self)
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
