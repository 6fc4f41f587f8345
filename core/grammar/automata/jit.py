"""The hot loops of grammars: machine code where there is object code, the same functions in Python until then.

Object code comes with the package, or from the cache folder of this machine (kernels/cpu/compiled): linking all loops
takes 0.1 s and imports llvmlite, but not numba. Where it is missing, processes of low priority compile it after the
first constraint and keep it; meanwhile, and without numba, the functions run as Python. No request waits for a
compiler.

    @inner            a function that loops call
    @loop("signature")   a loop that Python calls
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar

import numpy as np

from graftlm.core.interpreter_exit import EXIT_WAIT_S, end_llvm
from graftlm.kernels.cpu.compiled import array_functions, loop_cache, object_code
from graftlm.kernels.cpu.compiled.object_code import MachineCode, Wanted

if TYPE_CHECKING:
    import numpy.typing as npt

Int32Array: TypeAlias = "npt.NDArray[np.int32]"
P = ParamSpec("P")
T = TypeVar("T")

_GRAMMAR = "graftlm.core.grammar"
_MODULES = tuple(
    f"{_GRAMMAR}.{name}"
    for name in (
        *("automata.state_sets", "automata.determinize", "automata.distances", "automata.state_table"),
        *("automata.nfa.arrays", "automata.products.pairs"),
        *("automata.stack.call_sites", "automata.stack.rule_distances"),
        "schema.text.name_trie",
        *("masks.trie", "masks.trie_walk", "masks.stack_walk", "masks.self_loops"),
        *("masks.escapes", "masks.spelling", "masks.packed_row"),
    )
)
_NICE = 5
_POLL_S = 0.05

log = logging.getLogger("graftlm.grammar")

_loops: list[Loop[..., Any]] = []
_inner: list[Callable[..., object]] = []
_checks = False
"""Tests set this: machine code then checks the types of its arguments, which it is given as they are."""
_lock = threading.Lock()
_is_prepared = False
_thread: threading.Thread | None = None
_at_work = threading.Lock()
"""Held while loops are linked, which neither a fork nor the interpreter's exit may interrupt."""
_forking = threading.local()
_exiting = False

object_code.register(
    _GRAMMAR,
    [Path(__file__).parents[1].joinpath(*name.split(".")[3:]).with_suffix(".py") for name in _MODULES],
)


class Loop(Generic[P, T]):
    """A function that is replaced by its machine code once that is linked."""

    def __init__(self, function: Callable[P, T], signature: str, *, quick: bool = False) -> None:
        self.python = function
        self.signature = signature
        self.quick = quick
        self.machine_code: Callable[P, T] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.machine_code is not None:
            return self.machine_code(*args, **kwargs)
        if not _is_prepared:
            prepare()
            if self.machine_code is not None:
                return self.machine_code(*args, **kwargs)
        return self.python(*args, **kwargs)

    @property
    def wanted(self) -> Wanted:
        """The name of the loop's object code."""
        return f"{self.python.__module__}.{self.python.__name__}", ()

    def compile(self) -> MachineCode:
        """Compile with numba, in a process that does nothing else."""
        _import_all()
        register_jitable = importlib.import_module("numba.extending").register_jitable
        while _inner:
            register_jitable(_inner.pop())
        return array_functions.compile_function(self.python, self.signature)


def inner(function: Callable[P, T]) -> Callable[P, T]:
    """Let loops call `function`; in Python it stays as it is."""
    _inner.append(function)
    return function


def loop(signature: str, *, quick: bool = False) -> Callable[[Callable[P, T]], Loop[P, T]]:
    """Compile the function for arguments of these numba types.

    quick  the loop takes microseconds and keeps Python's lock: a thread that releases it waits up to 5 ms to get it
           back.
    """

    def wrap(function: Callable[P, T]) -> Loop[P, T]:
        found = Loop(function, signature, quick=quick)
        _loops.append(found)
        return found

    return wrap


def wanted() -> list[Wanted]:
    """Return the names of all loops, for object code that is made ahead of time."""
    _import_all()
    return [one.wanted for one in _loops]


def prepare(*, compiles: bool = True) -> None:
    """Link the loops if the object code of all is ready; else start to compile it, and return at once.

    compiles  False leaves what is missing to a later call
    """
    global _is_prepared, _thread
    if _is_prepared:
        return
    with _lock:
        if _is_prepared:
            return
        if not array_functions.reads_arrays():
            log.warning("the loops of grammars run as Python, slowly: there is no machine code for this interpreter")
        else:
            missing = [name for name in wanted() if not loop_cache.is_ready(*name)]
            if missing and not compiles:
                return
            if missing and loop_cache.has_numba():
                _thread = threading.Thread(target=_compile, args=(missing,), name="graftlm grammar loops", daemon=True)
                _thread.start()
            else:
                if missing:
                    log.warning("numba is not installed: automata and masks of constraints are made in Python, slowly")
                _link()
        _is_prepared = True


def wait() -> None:
    """Wait until the loops are machine code, or cannot be."""
    prepare()
    if _thread is not None:
        _thread.join()


def _import_all() -> None:
    for name in _MODULES:
        importlib.import_module(name)


def _compile(missing: list[Wanted]) -> None:
    """Compile in other processes, or here if nothing can be kept, and link all loops."""
    made: dict[str, MachineCode] = {}
    if loop_cache.can_compile():
        loop_cache.start_processes(missing, max(1, (os.cpu_count() or 1) // 2), _NICE)
        while loop_cache.compiling() and not _exiting:
            time.sleep(_POLL_S)
    for name, arguments in [] if loop_cache.can_compile() else missing:
        with _at_work:
            if _exiting:
                return
            made[name] = loop_cache.compile_one(name, arguments)
    _link(made)


def _link(made: Mapping[str, MachineCode] | None = None) -> None:
    """Link the loops that have object code, in the package, the cache folder or `made`; other loops stay Python."""
    from graftlm.kernels.cpu.compiled.loop_runtime import link

    made = made or {}
    with _at_work:
        for one in _loops:
            if _exiting:
                return
            found = None
            if one.machine_code is None:
                found = made.get(one.wanted[0]) or loop_cache.load(*one.wanted)
            if found is not None:
                call = array_functions.call_of(link(found), one.signature, keeps_lock=one.quick)
                one.machine_code = array_functions.checked(call, one.signature) if _checks else call
    left = [one.python.__name__ for one in _loops if one.machine_code is None]
    if left and loop_cache.has_numba() and not _exiting:
        log.warning("these loops of grammars were not compiled and run as Python, slowly: %s", ", ".join(left))


@atexit.register
def _exit() -> None:
    global _exiting
    _exiting = True
    if _at_work.acquire(timeout=EXIT_WAIT_S):
        _at_work.release()
    end_llvm()


def _before_fork() -> None:
    _forking.waited = _at_work.acquire(timeout=EXIT_WAIT_S)


def _after_fork() -> None:
    if getattr(_forking, "waited", False):  # unset if this module was imported while the fork was under way
        _forking.waited = False
        _at_work.release()


def _forget() -> None:
    """In a forked child the thread does not run: loops that it had not linked are linked at the next call."""
    global _at_work, _is_prepared, _lock, _thread
    _at_work, _lock = threading.Lock(), threading.Lock()
    _thread = None
    _is_prepared = all(one.machine_code is not None for one in _loops) and _is_prepared


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget)
