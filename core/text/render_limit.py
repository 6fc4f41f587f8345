"""A limit of time for chat templates, which are programs of a model's author and may loop for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from graftlm.core.errors import ConfigError
from graftlm.core.interpreter_exit import interrupt

T = TypeVar("T")

MOST_S = 20.0
"""Seconds of processor time that rendering one conversation may take: 1,000 times a long one's."""
_WAITS = 10
"""Times MOST_S that it may take by the clock, on a busy machine."""
_POLL_S = 0.2

_changed = threading.Condition()
_running: dict[int, _Render] = {}
_watching = False


class _TooLate(BaseException):
    """Ends a template, which cannot catch it."""


@dataclass
class _Render:
    thread: threading.Thread
    clock: int | None  # of the thread's processor time, where the system has one
    began_s: float
    ends_s: float
    interrupted: bool = False

    @classmethod
    def begin(cls) -> _Render:
        clock_of = getattr(time, "pthread_getcpuclockid", None)
        clock = None if clock_of is None else clock_of(threading.get_ident())
        began_s = 0.0 if clock is None else time.clock_gettime(clock)
        return cls(threading.current_thread(), clock, began_s, time.monotonic() + _WAITS * MOST_S)

    @property
    def too_late(self) -> bool:
        took_s = 0.0 if self.clock is None else time.clock_gettime(self.clock) - self.began_s
        return took_s > MOST_S or time.monotonic() > self.ends_s


def limited(render: Callable[[], T]) -> T:
    """Return `render()`. Raises: ConfigError if it takes more than MOST_S of processor time.

    A watcher raises an exception in this thread; a single C function, such as one `replace`, is not interrupted.
    """
    one = _Render.begin()
    _watch(one)
    try:
        try:
            found = render()
        except _TooLate:
            raise
        except BaseException:
            _settle(one)
            raise
        _settle(one)
    except _TooLate:
        with _changed:
            _running.pop(id(one), None)
        raise ConfigError(f"the chat template runs for more than {MOST_S:g} s; it may loop for ever: mend it") from None
    return found


def _watch(one: _Render) -> None:
    global _watching
    with _changed:
        _running[id(one)] = one
        if not _watching:
            _watching = True
            threading.Thread(target=_poll, name="graftlm templates", daemon=True).start()
        _changed.notify()


def _settle(one: _Render) -> None:
    """End the watch; wait for an exception that was sent meanwhile, which must not strike later."""
    with _changed:
        _running.pop(id(one), None)
    while one.interrupted:
        time.sleep(0.001)


def _poll() -> None:
    while True:
        with _changed:
            while not _running:
                _changed.wait()
            for one in _running.values():
                if one.too_late and not one.interrupted:
                    one.interrupted = True
                    interrupt(one.thread, _TooLate)
        time.sleep(_POLL_S)


def _start_over() -> None:
    """Forget the parent's renderings: its watcher does not run in a forked child."""
    global _changed, _watching
    _changed, _watching = threading.Condition(), False
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
