"""EngineThread: the one thread that owns an engine, and the queue of tasks that other threads post to it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from graftlm.core.errors import EngineError, GraftError, ModelError
from graftlm.core.interpreter_exit import EXIT_WAIT_S, begin_exit, end_llvm, end_thread, keep_interrupt
from graftlm.core.metrics import Stats
from graftlm.core.request import EndListener
from graftlm.core.serving.caller_waves import CallerWaves, WakeChain

if TYPE_CHECKING:
    from graftlm.core.engine_protocol import Engine
    from graftlm.core.kv.waits import Waits
    from graftlm.core.request import Submission

Task = Callable[["Engine"], object]
BuildEngine = Callable[[Callable[[], None]], "Engine"]
"""Builds the engine on its thread. The argument wakes that thread from any other one."""

POLL_S = 0.02
"""Poll interval, in seconds, while all requests wait for outside work, such as a grammar."""

log = logging.getLogger("graftlm.engine")


class EndedEngine:
    """An engine that ends every request with the cause."""

    idle = True

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def add(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            submission.listener.on_error(self._error)

    def step(self) -> bool:
        return False

    def cancel(self, submission_id: int) -> None:
        """Do nothing: no request runs."""

    def fail_all(self, error: BaseException) -> None:
        """Do nothing: no request runs."""

    def stats(self) -> Stats:
        return Stats()

    def reset_stats(self) -> None:
        """Do nothing: there are no counters."""

    def clear_cache(self) -> None:
        """Do nothing: there is no cache."""

    def unpin(self, pin: int) -> None:
        """Do nothing: there are no pins."""

    def close(self) -> None:
        """Do nothing: there are no resources."""


class EngineThread:
    """The thread that builds an engine, runs its steps, and runs tasks between them.

    A task that raises, even SystemExit, ends alone: the engine and later tasks continue. An error outside
    tasks and request callbacks ends the engine and every request. The thread does not refer to the
    runtime in front of it, so an unreferenced runtime is freed.

    gathers     whether to wait for callers that return together (CallerWaves); for engines that batch.
    answers_on  returns whether the current thread is another one that delivers this engine's answers.
    """

    def __init__(
        self,
        name: str,
        build: BuildEngine,
        *,
        gathers: bool = False,
        answers_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.build = build
        self.gathers = gathers
        self.answers_on = answers_on
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.closed = False
        self._step_began_s: float | None = None
        self._loaded = threading.Event()
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._waves = CallerWaves()
        self.wakes: WakeChain | None = None  # set if the engine waits for a device
        self._gathering = False
        self._num_urgent = 0  # tasks that do not wait for callers
        self._woken = False  # since this thread's last wait
        self._thread: threading.Thread | None = None

    @property
    def loaded(self) -> bool:
        return self._loaded.is_set()

    @property
    def loading(self) -> bool:
        """True while the engine is being built."""
        return self._thread is not None and not self.loaded

    @property
    def runs(self) -> bool:
        """Whether sequences run that wait for no constraint, or may run in another process. From any thread."""
        scheduler = getattr(self.engine, "scheduler", None)
        return scheduler is None or any(sequence.ready for sequence in list(scheduler.running))

    def unavailable(self, max_step_s: float) -> str | None:
        """Return the reason why requests are not served: loading, ended, or in a step for over `max_step_s`.

        None if they are served.
        """
        if self.failure is not None:
            return str(self.failure)
        if self.closed:
            return "the runtime is closed"
        if not self.loaded:
            return "the model is being loaded"
        began_s = self._step_began_s
        if began_s is not None and (took_s := time.monotonic() - began_s) > max_step_s:
            return f"the engine is in one step for {took_s:.0f} s"
        return None

    def start(self) -> None:
        """Start the thread, which builds the engine, unless it runs."""
        with self._changed:
            if self._thread is None and not self.closed:
                self._thread = threading.Thread(target=self._serve, name=f"graftlm {self.name}", daemon=True)
                self._thread.start()
                _started.add(self)

    def wait_loaded(self) -> None:
        """Wait until the engine is built; raise the error that prevented it."""
        self.check_may_wait("load")
        self.start()
        self._loaded.wait()
        if self.failure is not None:
            raise self.failure

    def post(self, task: Task, *, asks: bool = False) -> None:
        """Run `task` between two steps. After the engine's end it runs on an EndedEngine.

        asks  whether it submits the request of a caller. While the thread waits for returning callers, it is not
              woken for each of them, but for the last one only.
        """
        if self._thread is None:
            self.start()
        with self._changed:
            if not self.closed:
                self._tasks.append(task)
                self._num_urgent += not asks
                _interrupt(self.engine, True)
                waits_for_more = False
                if asks:
                    now = time.monotonic()
                    self._waves.asked(now)
                    waits_for_more = self._gathering and self._waves.hold_s(now) > 0
                if not waits_for_more:
                    self._changed.notify()
                return
        task(EndedEngine(self._cause))

    def add(self, submissions: Sequence[Submission]) -> None:
        """Submit requests to the engine at once. If that fails, each listener receives the error.

        If the caller is interrupted meanwhile, the requests are cancelled.
        """
        if not submissions:
            return
        engine = None if self.closed else self.engine
        works_elsewhere = engine is not None and getattr(engine, "any_thread", False)
        asks = len(submissions) == 1 and self.gathers and not works_elsewhere
        if asks:
            submissions[0].listener = EndListener(submissions[0].listener, self._answered)

        def run(engine: Engine) -> None:
            try:
                engine.add(submissions)
            except BaseException as error:
                for submission in submissions:
                    with _logged("cancelling a request that was not taken"):
                        engine.cancel(submission.id)
                    failure = EngineError(f"the engine did not take the request: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                    with _logged("a listener"):
                        submission.listener.on_error(failure)
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    raise  # the caller's own error

        try:
            if works_elsewhere and engine is not None:
                run(engine)
            else:
                self.post(run, asks=asks)
        except BaseException:
            for submission in submissions:
                self.post(partial(_cancel, submission.id))
            raise

    def _answered(self) -> None:
        with self._changed:
            self._waves.answered(time.monotonic())

    def call(self, task: Callable[[Engine], Any], name: str = "call") -> Any:
        """Run `task` between two steps and return its result. `name` is the caller's method, for `check_may_wait`."""
        self.check_may_wait(name)
        future: Future[Any] = Future()

        def run(engine: Engine) -> None:
            try:
                future.set_result(task(engine))
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future.result()

    def check_may_wait(self, name: str) -> None:
        """Raise EngineError on the engine's own thread, where the call `name` would deadlock."""
        if threading.current_thread() is self._thread or self.answers_on():
            raise EngineError(
                f"{name} was called in on_chunk, a future's callback or a plugin's hook, which run on the engine's own "
                "thread, so it would wait for itself; use submit() there, or call it on another thread"
            )

    def wake(self) -> None:
        """Wake the thread for another step, even if the engine is idle."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        """End after the current step, without waiting."""
        with self._changed:
            self.closed = True
            _interrupt(self.engine, True)
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None and self._thread is not threading.current_thread() and not self.answers_on():
            self._thread.join(timeout)

    def _serve(self) -> None:
        engine: Engine
        try:
            engine = self.engine = self.build(self.wake)
            if getattr(engine, "waits_for_device", False):
                self.wakes, engine.device_wait = WakeChain(), self._waiting  # type: ignore[attr-defined]
        except BaseException as error:
            self.failure = _as_model_error(self.name, error)
            engine = EndedEngine(self.failure)
        self._loaded.set()
        try:
            self._loop(engine)
        except BaseException as error:
            cause = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            self.failure = EngineError(f"the engine stopped: {cause}")
            self.failure.__cause__ = error
        self._finish(engine)

    def _loop(self, engine: Engine) -> None:
        progressed = True
        while True:
            self._wakes_callers()
            with self._changed:
                self._await_work(engine, progressed)
                if self.closed:
                    return
                num_tasks = len(self._tasks) if self._gathered(engine) else 0
                _interrupt(self.engine, False)
            for _ in range(num_tasks):
                with _logged("a task between two steps"):
                    self._tasks.popleft()(engine)
            progressed = engine.idle
            if not progressed:
                self._step_began_s = time.monotonic()
                progressed = engine.step()
                self._step_began_s = None

    def _gathered(self, engine: Engine) -> bool:
        """Return True to take the tasks; wait for returning callers first, unless the engine has other work."""
        while not (self.closed or self._num_urgent) and (hold_s := self._waves.hold_s(time.monotonic())) > 0:
            if not engine.idle:
                return False
            self._gathering = True
            self._wait(hold_s)
        self._gathering = False
        self._num_urgent = 0
        self._waves.admitted()
        return True

    def _await_work(self, engine: Engine, progressed: bool) -> None:
        while not self._tasks and not self.closed and (engine.idle or not progressed):
            if engine.idle:
                self._wait(POLL_S if self._wakes_callers() else None)
            else:
                if not self._woken:
                    self._wait(POLL_S)
                self._woken = False
                return

    def _wakes_callers(self) -> bool:
        """Return True while answered callers are still to be woken."""
        return self.wakes is not None and self.wakes.check()

    def _wait(self, timeout_s: float | None = None) -> None:
        with self._waiting():
            self._changed.wait(timeout_s)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Wake callers while this thread waits for tasks or for the device."""
        if self.wakes is None:
            yield
            return
        self.wakes.pause(False)
        try:
            yield
        finally:
            self.wakes.pause(True)

    def _finish(self, engine: Engine) -> None:
        """End every request, including queued ones."""
        with self._changed:
            self.closed = True
            tasks, self._tasks = self._tasks, deque()
        error = self._cause
        with ExitStack() as ends:
            if self.failure is not None:
                ends.enter_context(suppress(Exception))  # cleanup of a broken engine may fail; the cause is recorded
            ends.callback(engine.close)
            ends.callback(_answer, tasks, error)
            ends.callback(setattr, self, "engine", None)
            ends.callback(engine.fail_all, error)
            if self.wakes is not None:
                ends.callback(self.wakes.close)

    @property
    def _cause(self) -> BaseException:
        """The error of requests after the engine's end."""
        return self.failure or EngineError("the runtime was closed before the request finished")


class Pin:
    """A warmed prefix of `num_tokens` tokens; evictable again after `unpin()`."""

    def __init__(self, thread: EngineThread, pin: int | None, num_tokens: int) -> None:
        self._thread = thread
        self._pin = pin
        self.num_tokens = num_tokens

    def unpin(self) -> None:
        """Make the prefix evictable. Idempotent, and allowed after the runtime was closed."""
        pin, self._pin = self._pin, None
        if pin is not None:
            self._thread.post(lambda engine: engine.unpin(pin))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpin()


class Held:
    """A cached prefix whose caller returns later, see `Runtime.hold`. It ends by itself when the caller returns."""

    def __init__(self, thread: EngineThread, number: int) -> None:
        self._thread = thread
        self._number = number

    def release(self) -> None:
        """End the hold: nobody returns. Idempotent, and allowed after the runtime was closed."""
        number = self._number
        self._thread.post(lambda engine: _release(engine, number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def waits_of(engine: Any) -> Waits | None:
    """Return the holds of an engine's cache; None for an engine without a cache of its own."""
    found: Waits | None = getattr(getattr(engine, "cache", None), "waits", None)
    return found


def _release(engine: Any, number: int) -> None:
    waits = waits_of(engine)
    if waits is not None:
        waits.release(number)


def _interrupt(engine: Engine | None, wanted: bool) -> None:
    """Set whether an engine that runs several steps in one call must stop after the current one."""
    interrupt = getattr(engine, "interrupt", None)
    if interrupt is not None:
        interrupt(wanted)


def _answer(tasks: Iterable[Task], error: BaseException) -> None:
    for task in tasks:
        with _logged("a task after the end"):
            task(EndedEngine(error))


def _cancel(submission_id: int, engine: Engine) -> None:
    engine.cancel(submission_id)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log errors of one caller's code, so that they do not affect other requests."""
    try:
        yield
    except BaseException:
        log.exception("%s failed", what)


_started: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _abandon_load(one: EngineThread) -> None:
    """Interrupt a build of the engine until its thread ends, because the process exits."""
    if one._thread is not None:
        end_thread(one._thread, EXIT_WAIT_S, one._loaded.is_set)


@atexit.register
def _end_all() -> None:
    """End all engines at exit: the process would abort if a thread were inside torch then."""
    begin_exit()
    threads = list(_started)
    for thread in threads:
        thread.stop()
    for thread in threads:
        _abandon_load(thread)
        thread.join(EXIT_WAIT_S)
    end_llvm()
    keep_interrupt()


def _as_model_error(name: str, error: BaseException) -> GraftError:
    if isinstance(error, GraftError):
        return error
    if isinstance(error, SystemExit):
        return EngineError(f"the process exits while {name!r} loads; wait for its requests before the exit")
    failure = ModelError(f"{name!r} could not be loaded: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
