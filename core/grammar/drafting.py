"""Processes that draft grammars, so that many new constraints hold up neither each other nor the engine's steps.

Compiling is mostly Python, and in threads it would take Python's lock from the engine at each of its calls that give it
away. One helper imports what compiling needs and forks the processes, which share that memory. Each answers over a pipe
of its own and ends when the pipe is closed, as it is when this process ends in whatever way.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import WALL_FACTOR
from graftlm.core.grammar.draft import Draft, draft
from graftlm.core.grammar.spec import JsonSchema, Options, Spec

MAX_PROCESSES = 12
MIN_CORES = 8
"""With fewer cores two threads compile: processes would take them from the model."""

_PATIENCE_S = 10.0
"""How long to wait for an answer beyond the latest end of a compilation, before it is done here."""

log = logging.getLogger("graftlm.grammar")


def default_count() -> int:
    """How many processes this machine should have."""
    if sys.platform != "linux" or not sys.executable:
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(MAX_PROCESSES, 3 * cores // 4) if cores >= MIN_CORES else 0


Answer: TypeAlias = Draft | GrammarError | None
"""What a process found; None where it ended, hung, or met something else: the caller compiles here."""


class _Task(NamedTuple):
    """A constraint to draft, as it is sent, and who is told what was found."""

    data: bytes
    longest_s: float
    done: Callable[[Answer], object]


class DraftingProcesses:
    """`count` processes; none runs before `start`. Thread-safe.

    One thread reads all their answers and calls back: with a thread for each process, every one of them would wait for
    Python's lock several times per constraint.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_drafted = 0
        self._helper: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._settled = threading.Event()  # each is ready or has failed to start
        self._alive: set[Connection] = set()
        self._idle: list[Connection] = []
        self._waiting: deque[_Task] = deque()
        self._at_work: dict[Connection, tuple[_Task, float]] = {}  # and when to give it up

    @property
    def ready(self) -> bool:
        """Whether a process waits for work or is at work."""
        return bool(self._alive)

    def start(self) -> None:
        """Start the processes, once; returns at once. Where that fails, none will be ready."""
        with self._lock:
            if self._helper is not None or not self.count:
                return
            pairs = [Pipe() for _ in range(self.count)]
            descriptors = [theirs.fileno() for _, theirs in pairs]
            code = f"from {__name__} import serve; serve({descriptors})"
            threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
            try:
                self._helper = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", code],
                    env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(sys.path)},
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                log.warning("no processes compile constraints, threads do: %s", error)
                self.count = 0
            finally:
                for _, theirs in pairs:
                    theirs.close()
            self._connections = [ours for ours, _ in pairs]
            for connection in self._connections:
                _limit_waiting(connection)
            threading.Thread(target=self._read_answers, name="graftlm grammar", daemon=True).start()

    def wait(self) -> None:
        """Wait until each process is ready or has failed to start."""
        if self._connections:
            self._settled.wait()

    def submit(self, spec: Spec, options: Options, done: Callable[[Answer], object]) -> None:
        """Have one of the processes draft `spec`; `done` gets the answer, mostly on the thread that reads them.

        What `done` does holds up the other answers.
        """
        longest_s = WALL_FACTOR * options.limits.seconds + _PATIENCE_S
        task = _Task(pickle.dumps((spec, options)), longest_s, done)
        with self._lock:
            accepted = bool(self._alive)
            if accepted:
                self._waiting.append(task)
        if accepted:
            self._send()
        else:
            done(None)

    def _send(self) -> None:
        """Give waiting tasks to idle processes."""
        while True:
            with self._lock:
                if not self._waiting or not self._idle:
                    return
                connection, task = self._idle.pop(), self._waiting.popleft()
                self._at_work[connection] = task, time.monotonic() + task.longest_s
            with suppress(OSError, ValueError):  # it has ended: the thread that reads will see it, and the task with it
                connection.send_bytes(task.data)

    def _read_answers(self) -> None:
        """Until the last process has ended. A process gets its next task before anybody is told of its last one."""
        answers: deque[tuple[_Task, bytes]] = deque()
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ, connection)
            num_starting = len(self._connections)
            while answers or selector.get_map():
                found = {key.data for key, _ in selector.select(0 if answers else self._next_limit_s())}
                now = time.monotonic()
                late = [connection for connection, (_, limit) in list(self._at_work.items()) if limit < now]
                for connection in found.union(late):
                    try:
                        if connection not in found:
                            raise TimeoutError
                        data = connection.recv_bytes()
                    except Exception:  # it has ended or hangs
                        selector.unregister(connection)
                        num_starting -= self._lose(connection)
                    else:
                        task = self._take(connection)
                        if task is None:
                            num_starting -= 1
                        else:
                            answers.append((task, data))
                self._send()
                if not num_starting:
                    self._settled.set()
                if answers:
                    task, data = answers.popleft()
                    answer = _read(data)
                    self.num_drafted += isinstance(answer, Draft)
                    _tell(task, answer)

    def _next_limit_s(self) -> float:
        limits = [limit for _, limit in list(self._at_work.values())]
        return min([_PATIENCE_S, *[max(0.0, limit - time.monotonic()) for limit in limits]])

    def _take(self, connection: Connection) -> _Task | None:
        """The task that a process has answered; None where it says that it is ready."""
        with self._lock:
            task, _ = self._at_work.pop(connection, (None, 0.0))
            self._alive.add(connection)
            self._idle.append(connection)
        return task

    def _lose(self, connection: Connection) -> bool:
        """A process that has ended or hangs; whether it was starting."""
        with self._lock:
            was_alive = connection in self._alive
            self._alive.discard(connection)
            if connection in self._idle:
                self._idle.remove(connection)
            lost = [self._at_work.pop(connection)[0]] if connection in self._at_work else []
            if not self._alive:
                lost += self._waiting
                self._waiting.clear()
            connection.close()
        if was_alive and self.count:
            log.warning("a process that compiles constraints has ended; one fewer does so")
        for task in lost:
            _tell(task, None)
        return not was_alive

    def close(self) -> None:
        """End the processes; what they are at is compiled here."""
        with self._lock:
            helper, self.count = self._helper, 0
            for connection in self._connections:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)  # which the thread that reads sees, as closing is not
        if helper is not None:
            helper.kill()  # those it forked end with their pipes
            helper.wait()

    def forget(self) -> None:
        """In a fork: they are the parent's."""
        self._begin()
        self.count = 0
        for connection in self._connections:
            with suppress(OSError):
                connection.close()
        if self._helper is not None:
            self._helper.returncode = 0  # no child of this process


def _limit_waiting(connection: Connection) -> None:
    """Have no message wait longer than `_PATIENCE_S` for a process that hangs halfway: OSError then."""
    limit = struct.pack("ll", int(_PATIENCE_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _read(data: bytes) -> Answer:
    with suppress(Exception):  # it wrote what cannot be read
        answer: Answer = pickle.loads(data)
        return answer
    return None


def _tell(task: _Task, answer: Answer) -> None:
    try:
        task.done(answer)
    except Exception:
        log.exception("a constraint was drafted for nothing")


_all: weakref.WeakSet[DraftingProcesses] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for processes in list(_all):
        processes.close()


def _forget_all() -> None:
    for processes in list(_all):
        processes.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def serve(descriptors: list[int]) -> None:
    """Be the helper: get ready, fork a process for each pipe, and end with the last of them."""
    from graftlm.core.grammar.automata import jit

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the terminal is for the process in front
    jit.wait()
    for payload in ({"type": "integer"}, {}):
        draft(JsonSchema({"type": "object", "properties": {"a": payload, "b": {"type": "string"}}}), Options())
    gc.collect()
    gc.freeze()  # so that no collection touches what the forks share
    for descriptor in descriptors:
        if os.fork() == 0:
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            with suppress(EOFError, OSError):
                _answer(Connection(descriptor))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _answer(connection: Connection) -> None:
    connection.send(None)  # ready
    while True:
        spec, options = connection.recv()
        try:
            found: Draft | GrammarError | None = draft(spec, options)
        except GrammarError as error:
            found = error
        except Exception:  # too deep a recursion, too little memory: met again, and reported, where it was asked
            found = None
        connection.send(found)
