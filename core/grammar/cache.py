"""The cache of compiled grammars: equal constraints are compiled once, on worker threads, and memory is bounded."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeAlias

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.compile import Grammar, can_be_drafted, compile_spec, read_options
from graftlm.core.grammar.drafting.draft import Draft, from_draft
from graftlm.core.grammar.drafting.processes import Answer, DraftingProcesses, default_count
from graftlm.core.grammar.drafting.vocabulary_image import VocabularyImage
from graftlm.core.grammar.spec import JsonSchema, Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

MAX_BYTES = 512 << 20
NUM_WORKERS = 2
NUM_FINISHERS = 6
"""Threads for llguidance's part of what the processes drafted: 2 ms each, a fifth of it under Python's lock."""

_COUNTED_AT_ONCE = 10
"""Memory is counted after one new grammar for so many that are kept: counting asks all of them."""


_Task: TypeAlias = tuple[Hashable, "Future[Grammar]", Spec, Vocabulary, Options]
"""What to compile, under which key it is kept, and who waits for it."""

_caches: weakref.WeakSet[GrammarCache] = weakref.WeakSet()


class GrammarCache:
    """An LRU cache of grammars by (constraint, options, vocabulary). Thread-safe.

    max_bytes    approximate memory that the kept grammars may take, their masks included.
    num_workers  threads that compile.
    processes    processes that do most of it instead, while they are ready.

    Errors are not cached: everyone who waits for a constraint that fails gets its error, and the next caller compiles
    it again.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        num_workers: int = NUM_WORKERS,
        compiler: Callable[[Spec, Vocabulary, Options], Grammar] = compile_spec,
        processes: DraftingProcesses | None = None,
    ) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes is {max_bytes}; it must be 0 (keep nothing) or more")
        self.max_bytes = max_bytes
        self._compiler = compiler
        self._num_workers = num_workers
        self._processes = processes or DraftingProcesses(0)
        self._num_uncounted = 0
        # The least recently used first. Futures of those that are compiled would be eleven objects each, which
        # collections look at.
        self._kept: dict[Hashable, Grammar] = {}
        self._start()
        self.num_hits = 0
        self.num_misses = 0
        _caches.add(self)

    def _start(self) -> None:
        """Begin with workers and a lock of this process; what is compiled stays, what was being compiled goes."""
        self._workers = ThreadPoolExecutor(self._num_workers, thread_name_prefix="graftlm-grammar")
        self._finishers = ThreadPoolExecutor(NUM_FINISHERS, thread_name_prefix="graftlm-grammar-end")
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[Grammar]] = {}  # of those under way

    def submit(self, spec: Spec, vocabulary: Vocabulary, **options: Any) -> Future[Grammar]:
        """Compile on a worker thread; equal constraints under way share one future, which cannot be cancelled."""
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
            # marked as running at once, so that nobody can cancel what others wait for
            future.set_running_or_notify_cancel()
        task = (key, future, spec, vocabulary, given)
        if self._processes.ready and can_be_drafted(spec, vocabulary, given):
            self._processes.submit(spec, given, partial(self._finish, task), vocabulary.fingerprint)
        else:
            self._workers.submit(self._compile, self._compiler, *task)
        return future

    def _finish(self, task: _Task, answer: Answer) -> None:
        """Make the grammar of what a process drafted, or compile it here where none did."""
        if answer is None:
            self._workers.submit(self._compile, self._compiler, *task)
            return

        def drafted(spec: Spec, options: Options) -> Draft:
            if isinstance(answer, GrammarError):
                raise answer
            return answer

        compiler = partial(compile_spec, drafter=drafted)
        if isinstance(answer, GrammarError):
            self._compile(compiler, *task)
        elif answer.automaton is not None:
            self._compile(partial(from_draft, answer), *task)
        else:
            self._finishers.submit(self._compile, compiler, *task)

    def get(self, spec: Spec, vocabulary: Vocabulary, **options: Any) -> Grammar:
        """The grammar; waits while it is compiled."""
        return self.submit(spec, vocabulary, **options).result()

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the kept grammars."""
        with self._lock:
            return self._count()

    def __len__(self) -> int:
        return len(self._futures) + len(self._kept)

    def close(self) -> None:
        """Finish the compilations under way and accept no new ones; kept grammars stay."""
        self._processes = DraftingProcesses(0)
        with self._lock:
            futures = list(self._futures.values())
        wait(futures)
        self._workers.shutdown()
        self._finishers.shutdown()

    def clear(self) -> None:
        """Drop all grammars; sequences that use one keep it."""
        with self._lock:
            self._futures.clear()
            self._kept.clear()

    def _compile(
        self,
        compiler: Callable[[Spec, Vocabulary, Options], Grammar],
        key: Hashable,
        future: Future[Grammar],
        spec: Spec,
        vocabulary: Vocabulary,
        options: Options,
    ) -> None:
        try:
            grammar = compiler(spec, vocabulary, options)
            prepare: Callable[[], None] | None = getattr(grammar.compiled, "prepare_endings", None)
            if prepare is not None and isinstance(spec, JsonSchema):  # such texts are closed when their budget ends
                prepare()
        except BaseException as error:
            with self._lock:
                self._futures.pop(key, None)
            future.set_exception(error)
            return
        future.set_result(grammar)
        self._keep(key, future, grammar)

    def _keep(self, key: Hashable, future: Future[Grammar], grammar: Grammar) -> None:
        """Count a new grammar, and drop those that were used least recently while there are too many."""
        with self._lock:
            if self._futures.get(key) is future:  # not dropped meanwhile
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
    os.register_at_fork(after_in_child=_start_all)  # a fork has none of its parent's threads

processes = DraftingProcesses(default_count())
"""The processes that draft grammars for this one."""

_shared = GrammarCache(processes=processes)


def start_processes(image: Callable[[], VocabularyImage | None] | None = None) -> None:
    """Start the processes that compile constraints, on a machine with cores for them; see `DraftingProcesses.start`."""
    processes.start(image)


def submit_compile(spec: Spec, vocabulary: Vocabulary, **options: Any) -> Future[Grammar]:
    """`GrammarCache.submit` on the cache of this process."""
    return _shared.submit(spec, vocabulary, **options)


def compile_cached(spec: Spec, vocabulary: Vocabulary, **options: Any) -> Grammar:
    """`GrammarCache.get` on the cache of this process."""
    return _shared.get(spec, vocabulary, **options)
