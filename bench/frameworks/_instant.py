"""An engine that answers at once, and the cost of a call without any computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from graftlm import Completion, Runtime, Usage
from graftlm.core.metrics import Stats
from graftlm.core.request import Submission
from graftlm.plugins import manager
from graftlm.plugins.hookspecs import Register, hookimpl


class InstantEngine:
    """Answers every request as soon as it arrives: with "hello", or with the shortest text that its grammar allows."""

    idle = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._hello = "hello", tokenizer.encode_continuation("hello")
        self._endings: WeakKeyDictionary[Any, tuple[str, list[int]]] = WeakKeyDictionary()  # by grammar

    def add(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            text, ids = self._hello if submission.grammar is None else self._ending(submission)
            assert submission.prompt_ids is not None
            usage = Usage(len(submission.prompt_ids), 0, len(ids), 0)
            submission.listener.on_finish(Completion(text, list(ids), "stop", usage))

    def _ending(self, submission: Submission) -> tuple[str, list[int]]:
        assert submission.grammar is not None
        grammar = submission.grammar.result()
        if grammar not in self._endings:
            ids = list(grammar.matcher().ending(submission.prompt_ids))
            self._endings[grammar] = self._tokenizer.decode(ids), ids
        return self._endings[grammar]

    def step(self) -> bool:
        return False

    def stats(self) -> Stats:
        return Stats()

    def cancel(self, submission_id: int) -> None:
        """Do nothing: all requests have ended."""

    fail_all = reset_stats = clear_cache = unpin = cancel

    def close(self) -> None:
        """Do nothing: no resources are held."""


class InstantPlugin:
    @hookimpl
    def graftlm_register_engines(self, register: Register) -> None:
        register("instant", lambda model, config, *, tokenizer, wake: InstantEngine(tokenizer))


@contextmanager
def instant_runtime(model: str = "sprout") -> Iterator[Runtime]:
    """Build a runtime with the tokenizer and context of `model` that answers at once."""
    registry = manager.load()
    registry.add("bench-instant", InstantPlugin())
    try:
        with Runtime(model, engine="instant") as runtime:
            yield runtime
    finally:
        registry.remove("bench-instant")


def cpu_ms(job: Callable[[], Any], calls: int) -> float:
    """CPU milliseconds, all threads taken together, of one of the calls that a job makes; the best of four runs."""
    job()
    runs = []
    for _ in range(4):
        started = time.process_time()
        job()
        runs.append((time.process_time() - started) / calls * 1e3)
    return min(runs)
