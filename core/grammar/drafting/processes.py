"""Processes that draft grammars, so that many new constraints hold up neither each other nor the engine's steps.

Compiling is mostly Python, and in threads it would take Python's lock from the engine at each of its calls that give it
away. One helper imports what compiling needs and forks the processes, which share that memory. Each takes tasks from
one queue and answers over a socket of its own. The helper kills those that are given up, and all with itself when
this process closes them or ends in whatever way; the kernel does so when the helper is killed.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.budget import WALL_FACTOR
from graftlm.core.grammar.drafting.draft import Draft
from graftlm.core.grammar.drafting.drafting_process import DraftingProcess
from graftlm.core.grammar.drafting.messages import FOR_IMAGE, FORCED_TEXTS, READY, TaskQueue, socket_pair
from graftlm.core.grammar.drafting.vocabulary_image import VocabularyImage
from graftlm.core.grammar.spec import Options, Spec

MAX_PROCESSES = 12
MIN_CORES = 8
"""With fewer cores two threads compile: processes would take them from the model."""

_PATIENCE_S = 10.0
"""How long to wait for an answer beyond the latest end of a compilation, before it is done here, and for a process
that has nothing to do to take a task."""
_LOOK_S, _NEXT_LOOK_S = 1.0, 0.01
"""How often to look for what hangs, and how soon again for a task that seems to be lost."""
_MAIN = "from graftlm.core.grammar.drafting.worker import serve; serve({}, {}, {}, {}, {}, {})"

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
    """A constraint that is being drafted: how long that may take, since when it waits, and who is told of it."""

    longest_s: float
    since_s: float
    done: Callable[[Answer], object]


class DraftingProcesses:
    """`count` processes; none runs before `start`. Thread-safe.

    They take tasks from one queue by themselves: none waits until a thread of this process gets Python's lock. One
    thread reads all their answers and calls back; with a thread for each process, every one of them would wait for
    that lock several times per constraint. Who takes a task out of `_tasks` answers it, so that it is answered once.
    """

    def __init__(self, count: int) -> None:
        self.count = count if sys.platform == "linux" else 0
        self.num_drafted = 0
        self._fingerprint: str | None = None  # of the vocabulary that they have
        self._helper: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._queue: TaskQueue | None = None
        self._running: dict[int, DraftingProcess] = {}  # by the descriptor over which each answers
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        # for `_queue`, `_orders`, `_waiting`, `_alive`, and so that a task has a living process
        self._lock = threading.Lock()
        self._settled = threading.Event()  # each is ready or has failed to start
        self._alive: set[DraftingProcess] = set()
        self._tasks: dict[int, _Task] = {}
        self._waiting: deque[tuple[int, bytes]] = deque()  # those that do not fit into the queue
        self._last_number = 0
        self._missing: set[int] = set()
        self._next_look_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether a process waits for work or is at work."""
        return bool(self._alive)

    def start(self, image: Callable[[], VocabularyImage | None] | None = None) -> None:
        """Start the processes, once; returns at once. Where that fails, none will be ready.

        image  makes what they need of the vocabulary for which most constraints will be: for that one they work out
               forced texts as well. It is called where they start.
        """
        if self._helper is not None or not self.count:
            return
        made = None if image is None else image()
        with self._lock:
            if self._helper is not None or not self.count:
                return
            try:
                self._start(made)
            except OSError as error:
                log.warning("no processes compile constraints, threads do: %s", error)
                self.count = 0

    def _start(self, image: VocabularyImage | None) -> None:
        with ExitStack() as theirs:
            vocabulary = None
            if image is not None:
                vocabulary = os.memfd_create("vocabulary")
                theirs.callback(os.close, vocabulary)
                with open(vocabulary, "wb", closefd=False) as file:
                    pickle.dump(image, file, pickle.HIGHEST_PROTOCOL)
                self._fingerprint = image.fingerprint
            numbers = os.memfd_create("tasks at work")
            theirs.callback(os.close, numbers)
            os.ftruncate(numbers, 8 * self.count)
            self._numbers = memoryview(mmap.mmap(numbers, 8 * self.count)).cast("Q")
            self._ends = select.epoll()
            pairs = [socket_pair() for _ in range(self.count)]
            for _, end in pairs:
                theirs.callback(end.close)
            queue, descriptors = TaskQueue(), [end.fileno() for _, end in pairs]
            self._orders, orders = socket_pair()
            theirs.callback(orders.close)
            owner = _this_process()
            if owner is not None:
                theirs.callback(os.close, owner)
            threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
            code = _MAIN.format(queue.theirs.fileno(), descriptors, numbers, orders.fileno(), owner, vocabulary)
            passed = [queue.theirs.fileno(), *descriptors, numbers, orders.fileno()]
            passed += [descriptor for descriptor in (owner, vocabulary) if descriptor is not None]
            self._helper = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-c", code],
                env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._queue = queue
        for place, (end, _) in enumerate(pairs):
            self._running[end.fileno()] = DraftingProcess(place, end)
            self._ends.register(end, select.EPOLLIN)
        threading.Thread(target=self._read_answers, name="graftlm grammar", daemon=True).start()

    def wait(self) -> None:
        """Wait until each process is ready or has failed to start."""
        if self._helper is not None:
            self._settled.wait()

    def submit(
        self, spec: Spec, options: Options, done: Callable[[Answer], object], fingerprint: str | None = None
    ) -> None:
        """Have one of the processes draft `spec`; `done` gets the answer, mostly on the thread that reads them.

        What `done` does holds up the other answers. fingerprint  of the vocabulary that the grammar will be for
        """
        data = pickle.dumps(spec) + _pickled(options)
        if fingerprint is not None and fingerprint == self._fingerprint:
            data += FOR_IMAGE
        task = _Task(WALL_FACTOR * options.limits.seconds + _PATIENCE_S, time.monotonic(), done)
        with self._lock:
            accepted = bool(self._alive)
            if accepted:
                self._last_number += 1
                self._tasks[self._last_number] = task
                self._waiting.append((self._last_number, data))
        if accepted:
            self._put()
        else:
            done(None)

    def _put(self) -> None:
        """Put waiting tasks into the queue, as many as fit."""
        lost: list[int] = []
        with self._lock:
            while self._waiting and self._queue is not None:
                number, data = self._waiting[0]
                try:
                    if not self._queue.put(number, data):
                        break
                except OSError:  # too few descriptors for a long one
                    if len(self._tasks) > len(self._waiting):
                        break  # tried again after the next answer
                    lost.append(number)
                self._waiting.popleft()
        for number in lost:
            self._tell(number, None)

    def _read_answers(self) -> None:
        """Until the last process has ended."""
        try:
            while self._running:
                self._read_ready(max(0.0, self._next_look_s - time.monotonic()) if self._tasks else _PATIENCE_S)
                if self._tasks and time.monotonic() >= self._next_look_s:
                    self._look()
        finally:
            for descriptor in list(self._running):
                self._lose(descriptor)
            self._ends.close()
            with self._lock:
                self._end_helper()

    def _read_ready(self, timeout_s: float) -> bool:
        """Read what processes send within this time; whether any did."""
        found = self._ends.poll(timeout_s)
        for descriptor, _ in found:
            try:
                answered = self._running[descriptor].reader.read()
            except (EOFError, OSError):
                self._lose(descriptor)
                continue
            if answered is None:
                continue
            process, (number, data) = self._running[descriptor], answered
            if number == READY:
                with self._lock:
                    self._alive.add(process)
                self._settle()
            elif number == FORCED_TEXTS:
                process.add_texts(data)
            else:
                answer = _read(data)
                if isinstance(answer, Draft) and answer.forced is not None:
                    process.expect_texts(number, answer.forced)
                self._tell(number, answer)
                if self._waiting:
                    self._put()
        return bool(found)

    def _settle(self) -> None:
        if len(self._alive) == len(self._running):
            self._settled.set()

    def _look(self) -> None:
        """Give up processes that hang, and answer tasks that nobody has: who took them has ended or was given up."""
        now = time.monotonic()
        with self._lock:
            if self._queue is None:
                return
            head = self._queue.head
            not_taken = head or (self._waiting[0][0] if self._waiting else self._last_number + 1)
        for process in self._alive:
            if process.number != self._numbers[process.place]:
                process.number, process.since_s = self._numbers[process.place], now
        while self._read_ready(0.0):  # what they had answered by then
            pass
        next_task = self._tasks.get(head or 0)
        for descriptor, process in list(self._running.items()):
            task, until_s = self._tasks.get(process.number), now
            if task is not None:
                until_s = process.since_s + task.longest_s
            elif next_task is not None and process in self._alive:
                until_s = max(process.since_s, next_task.since_s) + _PATIENCE_S
            if until_s < now:
                self._lose(descriptor)
        missing = {number for number in list(self._tasks) if number < not_taken}
        missing -= {process.number for process in self._alive}
        for number in missing & self._missing:  # a process may have taken one a moment before, and not said so yet
            self._tell(number, None)
        self._missing = missing
        self._put()
        self._next_look_s = now + (_NEXT_LOOK_S if missing else _LOOK_S)

    def _lose(self, descriptor: int) -> None:
        """A process has ended or is given up."""
        process = self._running.pop(descriptor)
        self._ends.unregister(descriptor)
        with self._lock:
            was_alive = process in self._alive
            self._alive.discard(process)
            lost = [self._numbers[process.place]]
            if not self._alive:
                lost = list(self._tasks)
                self._waiting.clear()
            process.end.close()
            if self._orders is not None:
                with suppress(OSError):  # the helper has ended, and they with it
                    self._orders.send(str(process.place).encode(), socket.MSG_DONTWAIT)
        if was_alive and self.count:
            log.warning("a process that compiles constraints has ended; one fewer does so")
        for number in lost:
            self._tell(number, None)
        self._next_look_s = 0.0
        self._settle()

    def _tell(self, number: int, answer: Answer) -> None:
        """Answer a task, unless it is answered."""
        task = self._tasks.pop(number, None)
        if task is None:
            return
        self.num_drafted += isinstance(answer, Draft)
        try:
            task.done(answer)
        except Exception:
            log.exception("a constraint was drafted for nothing")

    def close(self) -> None:
        """End the processes; what they are at is compiled here."""
        with self._lock:
            self.count = 0
            for process in list(self._running.values()):
                with suppress(OSError):
                    process.end.shutdown(socket.SHUT_RDWR)  # which the thread that reads sees, as closing is not
            self._close_queue()
            self._end_helper()

    def _end_helper(self) -> None:
        """End the helper, and with it those that it forked."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()

    def _close_queue(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def forget(self) -> None:
        """In a fork: they are the parent's."""
        for process in list(self._running.values()):
            process.end.close()
        self._running.clear()
        self._close_queue()
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        self._begin()
        self._settled.set()
        self.count = 0
        if self._helper is not None:
            self._ends.close()
            self._helper.returncode = 0  # no child of this process


def _this_process() -> int | None:
    """A descriptor of this process, which can be read when it has ended; None where the machine has none."""
    with suppress(AttributeError, OSError):  # an old kernel, or a Python made for one
        return os.pidfd_open(os.getpid())
    return None


@lru_cache(maxsize=16)
def _pickled(options: Options) -> bytes:
    return pickle.dumps(options)


def _read(data: bytes | memoryview) -> Answer:
    with suppress(Exception):  # it wrote what cannot be read
        answer: Answer = pickle.loads(data)
        return answer
    return None


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
