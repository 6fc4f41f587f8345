"""The cache of compiled grammars: compiles equal constraints once, on worker threads, within a limit of memory."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Any

from graftlm.core.errors import ConfigError
from graftlm.core.grammar import budget
from graftlm.core.grammar.compile import Grammar, compile_spec, read_options
from graftlm.core.grammar.masks.rows.workers import Workers
from graftlm.core.grammar.spec import JsonSchema, Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

MAX_BYTES = 512 << 20
NUM_THREADS = 2
"""Threads that compile: mostly Python code, of which one thread runs at a time. The second one compiles small
constraints while a large one takes its seconds."""

_COUNTED_AT_ONCE = 10
"""Cached grammars per new grammar after which their memory is counted again, because counting visits all of them."""

_threads = Workers(NUM_THREADS, "grammar")
_caches: weakref.WeakSet[GrammarCache] = weakref.WeakSet()


class GrammarCache:
    """An LRU cache of grammars by (constraint, options, vocabulary). Thread-safe.

    max_bytes  approximate limit of the memory of cached grammars, their masks included

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
        self._futures: dict[Hashable, Future[Grammar]] = {}  # of grammars that are being compiled

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
            if key in self._futures:
                self.num_hits += 1
                return self._futures[key]
            self.num_misses += 1
            future = self._futures[key] = Future()
            future.set_running_or_notify_cancel()  # a caller must not cancel a future that other callers wait for
        _threads.submit(self._compile, key, future, spec, vocabulary, given)
        return future

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
        self, key: Hashable, future: Future[Grammar], spec: Spec, vocabulary: Vocabulary, options: Options
    ) -> None:
        try:
            grammar = self._compiler(spec, vocabulary, options)
            prepare: Callable[[], None] | None = getattr(grammar.compiled, "prepare_endings", None)
            if prepare is not None and isinstance(spec, JsonSchema):  # closed where max_tokens ends
                prepare()
        except BaseException as error:
            with self._lock:
                self._futures.pop(key, None)
            future.set_exception(error)
            return
        future.set_result(grammar)
        self._keep(key, future, grammar)

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


def _start_all() -> None:
    for cache in list(_caches):
        cache._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_all)

atexit.register(budget.stop)  # before the exit waits for the threads

_shared = GrammarCache()


def submit_compile(spec: Spec, vocabulary: Vocabulary, **options: Any) -> Future[Grammar]:
    """`GrammarCache.submit` on the cache of this process."""
    return _shared.submit(spec, vocabulary, **options)


def compile_cached(spec: Spec, vocabulary: Vocabulary, **options: Any) -> Grammar:
    """`GrammarCache.get` on the cache of this process."""
    return _shared.get(spec, vocabulary, **options)
