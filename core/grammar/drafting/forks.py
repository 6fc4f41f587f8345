"""Processes that another one forks and ends: none outlives it, whatever it or they are at."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_LONGEST_ORDER = 16


class Forks:
    """Forks of this process, by place. The thread that starts them has to live as long as the process does."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}
        self._prctl: Callable[..., int] | None = None
        with suppress(OSError, AttributeError):
            self._prctl = ctypes.CDLL(None).prctl

    def start(self, place: int, run: Callable[[], object]) -> None:
        """Fork a process that does `run` and ends."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._end_with(parent)
                run()
            finally:
                os._exit(0)
        self._pids[place] = pid

    def end(self, place: int) -> None:
        """Kill the process and wait for its end; nothing where it was ended before."""
        pid = self._pids.pop(place, None)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # nobody else has this pid: the process has not been waited for
            os.waitpid(pid, 0)

    def end_all(self) -> None:
        """Kill them; they are waited for by whoever waits for this process."""
        for pid in list(self._pids.values()):
            os.kill(pid, signal.SIGKILL)

    def _end_with(self, parent: int) -> None:
        """In a fork: have the kernel kill this process when the thread that forked it ends."""
        if self._prctl is not None:
            self._prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # which had ended before the kernel knew
            os._exit(0)


def follow(orders: socket.socket, owner: int | None, forks: Forks) -> None:
    """End the forks whose places the owner sends, one in each message, and all with this process when it has ended.

    owner  descriptor of the owner's process: a fork of it, made by code that is not Python's, may keep open the other
           end of `orders`. None where the machine has no such descriptors.
    """
    ends = select.poll()
    ends.register(orders, select.POLLIN)
    if owner is not None:
        ends.register(owner, select.POLLIN)
    try:
        while owner not in [descriptor for descriptor, _ in ends.poll()]:
            place = orders.recv(_LONGEST_ORDER)
            if not place:
                break
            forks.end(int(place))
    finally:
        forks.end_all()
        os._exit(0)
