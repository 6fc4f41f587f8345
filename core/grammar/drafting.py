"""Processes that draft grammars, so that many new constraints hold up neither each other nor the engine's steps.

Compiling is mostly Python, and in threads it would take Python's lock from the engine at each of its calls that give it
away. One helper imports what compiling needs and forks the processes, which share that memory. Each answers over a pipe
of its own and ends when the pipe is closed, as it is when this process ends in whatever way.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

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


class DraftingProcesses:
    """`count` processes; none runs before `start`. Thread-safe."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_drafted = 0
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._connections: list[Connection] = []
        self._awaiting: list[threading.Thread] = []
        self._idle: SimpleQueue[Connection | None] = SimpleQueue()  # None stands for one that has ended
        self._alive: set[Connection] = set()
        _all.add(self)

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
            self._connections = [ours for ours, _ in pairs]
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
            self._awaiting = [
                threading.Thread(target=self._await, args=(connection,), name="graftlm grammar", daemon=True)
                for connection in self._connections
            ]
            for thread in self._awaiting:
                thread.start()

    def wait(self) -> None:
        """Wait until each process is ready or has failed to start."""
        for thread in self._awaiting:
            thread.join()

    def _await(self, connection: Connection) -> None:
        """Take a process as ready when it says so."""
        with suppress(EOFError, OSError):
            connection.recv_bytes()
            self._alive.add(connection)
            self._idle.put(connection)

    def draft(self, spec: Spec, options: Options) -> Draft:
        """`draft` in one of the processes, here if that one ends or hangs. Only while they are `ready`.

        Waits while all of them are at work. Raises GrammarError.
        """
        connection = self._idle.get()
        answer: Any = None
        try:
            if connection is not None:
                answer = _asked(connection, spec, options)
        except (EOFError, OSError, pickle.PickleError, TimeoutError, ValueError):
            log.warning("a process that compiles constraints has ended; one fewer does so")
            self._alive.discard(connection)
            if connection is not None:
                connection.close()
            connection = None
        finally:
            self._idle.put(connection)
        if isinstance(answer, GrammarError):
            raise answer
        if isinstance(answer, Draft):
            self.num_drafted += 1
            return answer
        return draft(spec, options)

    def close(self) -> None:
        """End the processes; what they are at is compiled here."""
        with self._lock:
            helper, self.count = self._helper, 0
            for connection in self._connections:
                self._alive.discard(connection)
                with suppress(OSError):
                    connection.close()
        if helper is not None:
            helper.kill()  # those it forked end with their pipes
            helper.wait()

    def forget(self) -> None:
        """In a fork: they are the parent's."""
        self._lock = threading.Lock()
        self._alive = set()
        self.count = 0
        for connection in self._connections:
            with suppress(OSError):
                connection.close()
        if self._helper is not None:
            self._helper.returncode = 0  # no child of this process


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


def _asked(connection: Connection, spec: Spec, options: Options) -> Any:
    """The answer of a process: a Draft, a GrammarError, or None where it met something else."""
    connection.send((spec, options))
    longest_s = WALL_FACTOR * options.limits.seconds + _PATIENCE_S
    if not connection.poll(longest_s if math.isfinite(longest_s) else None):
        raise TimeoutError
    return connection.recv()


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
    connection.send_bytes(b"ready")
    while True:
        spec, options = connection.recv()
        try:
            found: Draft | GrammarError | None = draft(spec, options)
        except GrammarError as error:
            found = error
        except Exception:  # too deep a recursion, too little memory: met again, and reported, where it was asked
            found = None
        connection.send(found)
