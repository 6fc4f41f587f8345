"""The exit of the interpreter while threads of this package still run.

Threads import modules, and the interpreter may exit meanwhile. Python then skips the exit hooks that such a module
registers and, if the module calls `exec`, loses the exit status of the interrupt that ended the script.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_AGAIN_S = 0.2
"""Seconds after which a thread that has not ended is interrupted again."""

EXIT_WAIT_S = 60.0
"""Seconds that the exit waits for a thread's current work, on a machine that may be ten times as slow as an idle one. A
thread that is inside C++ afterwards aborts the process."""


_exit_began = threading.Event()


def begin_exit() -> None:
    """Note that the interpreter exits."""
    _exit_began.set()


def exit_began() -> bool:
    """Return True once the interpreter exits: work for later uses is wasted, and keeps the exit waiting."""
    return _exit_began.is_set()


def interrupt(thread: threading.Thread, kind: type[BaseException] = SystemExit) -> None:
    """Raise an exception of `kind` in `thread` at its next bytecode.

    A thread that is alive when the interpreter ends is unwound by the next C function that takes Python's lock. If a
    frame of C++ is on its stack then, the process aborts.
    """
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))


def end_thread(thread: threading.Thread, wait_s: float, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Interrupt a thread until it has ended, `is_enough` is true or `wait_s` seconds have passed, as the process exits.

    Python drops an exception that meets the callback of a weak reference, such as that of an import's lock, and reports
    it. The next one ends the thread, so reports of SystemExit are left out.
    """
    usual, limit_s = sys.unraisablehook, time.monotonic() + wait_s
    sys.unraisablehook = lambda dropped: None if dropped.exc_type is SystemExit else usual(dropped)
    try:
        while thread.is_alive() and not is_enough() and time.monotonic() < limit_s:
            interrupt(thread)
            thread.join(_AGAIN_S)
    finally:
        sys.unraisablehook = usual


def end_llvm() -> None:
    """Call the exit hooks of llvmlite and numba: Python skips hooks that are registered during the exit."""
    for name in ("llvmlite.binding.common", "numba.core.utils"):
        hook = getattr(sys.modules.get(name), "_at_shutdown", None)
        if hook is not None:
            hook()


def keep_interrupt() -> None:
    """Restore the exit status of SIGINT for a script that KeyboardInterrupt has ended.

    Python keeps the interrupt in a flag, which every `exec` clears, on any thread; dataclasses and named tuples, and
    so most imports, call it. An `exec` that ends with KeyboardInterrupt sets the flag again.
    """
    raised = getattr(sys, "last_traceback", None)
    by_script = raised is not None and raised.tb_frame.f_back is None and not hasattr(sys, "ps1")
    if by_script and getattr(sys, "last_type", None) is KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
