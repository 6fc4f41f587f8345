"""The cache of compiled grammars: compiles equal constraints once, on worker threads, within a limit of memory."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from graftlm.core.errors import ConfigError, GrammarError, Overloaded, RequestCancelled
from graftlm.core.grammar import budget
from graftlm.core.grammar.budget import WALL_FACTOR, Unwanted, Yielding, limited, while_waited_for
from graftlm.core.grammar.compile import Grammar, compile_spec, read_options, size_of
from graftlm.core.grammar.engines.automaton import AutomatonGrammar
from graftlm.core.grammar.masks.workers import Workers
from graftlm.core.grammar.matcher import ends_within
from graftlm.core.grammar.spec import JsonSchema, Limits, Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

MAX_BYTES = 512 << 20
NUM_THREADS = 2
"""Threads that compile: mostly Python code, of which one thread runs at a time."""

QUICK = Limits(seconds=0.25)
"""A constraint that takes longer is given up and compiled on a thread for slow ones, so that others need not wait. The
99th percentile of public schemas takes a quarter of it."""

TURN_S = 0.0005
"""Seconds for which a thread that compiles keeps Python's lock while others wait for it."""

SHORT_TOKENS = 64
"""A schema whose shortest text takes more tokens has its ending searched when it is compiled."""

LARGE_CHARS = 1 << 14
"""Longer constraints are compiled on a thread for slow ones. Their parts, and those of slow ones, are not kept in the
caches of parts: they would hold their memory."""

_COUNTED_AT_ONCE = 10
"""Cached grammars per new grammar after which their memory is counted again, because counting visits all of them."""

_threads = Workers(NUM_THREADS, "grammar")
_slow_threads = Workers(1, "slow grammar")
_caches: weakref.WeakSet[GrammarCache] = weakref.WeakSet()


class Compilation(Future[Grammar]):
    """A grammar that is being compiled, for all requests that wait for it. It cannot be cancelled.

    num_waiting  requests that wait and have not given up
    """

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__()
        self._counting = lock  # the cache's
        self.num_waiting = 1
        self.set_running_or_notify_cancel()

    def abandon(self) -> None:
        """Note that one of the waiting requests has ended. Without any, the compilation is dropped or ends early."""
        with self._counting:
            self.num_waiting -= 1


class GrammarCache:
    """An LRU cache of grammars by (constraint, options, vocabulary). Thread-safe.

    max_bytes  approximate limit of the memory of cached grammars, their masks included

    max_queued  limit of the constraints that wait for a thread; one more raises Overloaded. None: no limit

    Errors are not cached: all waiting callers get the error of a constraint, and the next caller compiles it again.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        compiler: Callable[[Spec, Vocabulary, Options], Grammar] = compile_spec,
    ) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes is {max_bytes}; it must be 0 (keep nothing) or more")
        self.max_bytes = max_bytes
        self.max_queued: int | None = None
        self._lanes: dict[bool, Yielding] = {}  # of slow compilations, and of the others
        self._compiler = compiler
        self._num_uncounted = 0
        # Least recently used first. A future per grammar would add eleven objects that the garbage collector visits.
        self._kept: dict[Hashable, Grammar] = {}
        self._start()
        self.num_hits = 0
        self.num_misses = 0
        _caches.add(self)

    def _start(self) -> None:
        """Make the lock and the futures of this process; a fork keeps the grammars that its parent has compiled."""
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Compilation] = {}  # of grammars that are being compiled

    def pause_beside(self, busy: Callable[[], bool]) -> None:
        """Let compilations pause while requests run; those on the thread for slow ones have a lane of their own.

        busy: whether requests run, from any thread
        """
        self._lanes = {False: Yielding(busy), True: Yielding(busy)}

    def submit(self, spec: Spec, vocabulary: Vocabulary, **options: Any) -> Future[Grammar]:
        """Compile on a worker thread. Equal constraints share one future, which cannot be cancelled."""
        given = read_options(options)
        key = (spec.key, given, vocabulary.fingerprint)
        with self._lock:
            grammar = self._kept.pop(key, None)
            if grammar is not None:
                self.num_hits += 1
                self._kept[key] = grammar
                future: Future[Grammar] = Future()
                future.set_result(grammar)
                return future
            compiling = self._futures.get(key)
            if compiling is not None:
                self.num_hits += 1
                compiling.num_waiting += 1
                return compiling
            if self.max_queued is not None and len(self._futures) > self.max_queued:
                raise Overloaded(f"{len(self._futures):,} constraints are being compiled; try again later")
            self.num_misses += 1
            compiling = self._futures[key] = Compilation(self._lock)
        if size_of(spec) > LARGE_CHARS:
            self._compile_slowly(key, compiling, spec, vocabulary, given)
        else:
            _threads.submit(self._compile, key, compiling, spec, vocabulary, given)
        return compiling

    def get(self, spec: Spec, vocabulary: Vocabulary, **options: Any) -> Grammar:
        """Return the grammar, after it is compiled."""
        return self.submit(spec, vocabulary, **options).result()

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the cached grammars."""
        with self._lock:
            return self._count()

    def __len__(self) -> int:
        return len(self._futures) + len(self._kept)

    def close(self) -> None:
        """Wait for the compilations under way."""
        with self._lock:
            futures = list(self._futures.values())
        wait(futures)

    def clear(self) -> None:
        """Drop all grammars. Sequences keep the grammars that they use."""
        with self._lock:
            self._futures.clear()
            self._kept.clear()

    def _compile(
        self,
        key: Hashable,
        future: Compilation,
        spec: Spec,
        vocabulary: Vocabulary,
        options: Options,
        *,
        quick: bool = True,
    ) -> None:
        if self._dropped(key, future):
            return
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        lane = self._lanes.get(not quick)
        quick = quick and options.limits.seconds > QUICK.seconds
        try:
            try:
                with (
                    short_turns(),
                    while_waited_for(future),
                    limited(QUICK) if quick else nullcontext(),
                    nullcontext() if lane is None else lane(),
                ):
                    grammar = self._compiler(spec, vocabulary, options)
            except Unwanted:
                if not self._dropped(key, future):  # another request has come meanwhile
                    self._compile_slowly(key, future, spec, vocabulary, options)
                return
            except GrammarError:
                # the short time may be the cause; and an engine that took too long may have made way for another one
                spent_s = time.thread_time() - began_cpu_s
                late = time.monotonic() - began_s > WALL_FACTOR * QUICK.seconds
                if not quick or (spent_s < QUICK.seconds and not late):
                    raise
                self._compile_slowly(key, future, spec, vocabulary, options)
                return
            finally:
                took_s = time.thread_time() - began_cpu_s
                if took_s > QUICK.seconds or size_of(spec) > LARGE_CHARS:
                    _forget_parts()
            if quick and took_s > QUICK.seconds:
                self._compile_slowly(key, future, spec, vocabulary, options)
                return
            if isinstance(spec, JsonSchema) and isinstance(grammar.compiled, AutomatonGrammar):
                ends_within(grammar.matcher(), SHORT_TOKENS)  # a long search here keeps the engine's thread free of it
        except BaseException as error:
            with self._lock:
                self._futures.pop(key, None)
            future.set_exception(error)
            return
        future.set_result(grammar)
        self._keep(key, future, grammar)

    def _dropped(self, key: Hashable, future: Compilation) -> bool:
        """Drop a compilation for which no request waits; return False if one does."""
        with self._lock:
            if future.num_waiting > 0:
                return False
            if self._futures.get(key) is future:
                del self._futures[key]
        future.set_exception(RequestCancelled("no request waits for the constraint any more"))
        return True

    def _compile_slowly(
        self, key: Hashable, future: Compilation, spec: Spec, vocabulary: Vocabulary, options: Options
    ) -> None:
        _slow_threads.submit(self._compile, key, future, spec, vocabulary, options, quick=False)

    def _keep(self, key: Hashable, future: Future[Grammar], grammar: Grammar) -> None:
        """Cache a new grammar, and drop the least recently used ones above the limit of memory."""
        with self._lock:
            if self._futures.get(key) is future:  # not cleared meanwhile
                del self._futures[key]
                self._kept[key] = grammar
            self._num_uncounted += 1
            if _COUNTED_AT_ONCE * self._num_uncounted < len(self._kept):
                return
            self._num_uncounted = 0
            excess = self._count() - self.max_bytes
            while excess > 0 and self._kept:
                excess -= self._kept.pop(next(iter(self._kept))).num_bytes

    def _count(self) -> int:
        return sum([grammar.num_bytes for grammar in self._kept.values()])


class _ShortTurns:
    """A context in which other threads get Python's lock ten times as often: the event loop and the engine need it
    for a moment. Several threads may be inside."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._lock, self._num_inside, self._usual_s = threading.Lock(), 0, sys.getswitchinterval()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, TURN_S))
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if self._num_inside == 0:
                    sys.setswitchinterval(self._usual_s)


short_turns = _ShortTurns()


def _forget_parts() -> None:
    """Clear the caches of parts of constraints in all modules of the grammar; tables without a limit stay."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_PACKAGE):
            for value in list(vars(module).values()):
                if isinstance(value, _CACHED) and value.cache_parameters()["maxsize"] is not None:
                    value.cache_clear()


_PACKAGE = __name__.rpartition(".")[0] + "."
_CACHED = type(lru_cache(maxsize=1)(len))


def _start_all() -> None:
    short_turns.start()
    for cache in list(_caches):
        cache._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_all)

atexit.register(budget.stop)  # before the exit waits for the threads

_shared = GrammarCache()


def share_process(max_queued: int, busy: Callable[[], bool]) -> None:
    """Compile beside requests that run: they get the cores first, and at most `max_queued` constraints wait for a
    thread; one more raises Overloaded. busy: whether requests run, from any thread"""
    _shared.max_queued = max_queued
    _shared.pause_beside(busy)
    _threads.step_back(5)
    _slow_threads.step_back(10)


def submit_compile(spec: Spec, vocabulary: Vocabulary, **options: Any) -> Future[Grammar]:
    """`GrammarCache.submit` on the cache of this process."""
    return _shared.submit(spec, vocabulary, **options)


def compile_cached(spec: Spec, vocabulary: Vocabulary, **options: Any) -> Grammar:
    """`GrammarCache.get` on the cache of this process."""
    return _shared.get(spec, vocabulary, **options)
