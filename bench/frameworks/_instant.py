"""An engine that answers at once, and what a call costs when nothing has to be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from graftlm import Completion, Request, Runtime, Usage


class Instant:
    """A runtime's tokenizer and context, and an answer to everything."""

    def __init__(self, runtime: Runtime) -> None:
        self.tokenizer, self.model_name, self.max_model_len = runtime.tokenizer, "instant", runtime.max_model_len

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        return [self.submit(request) for request in requests]

    def submit(self, request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_result(Completion("hello", [1], "stop", Usage(10, 5, 1, 0)))
        return future


def cpu_ms(call: Callable[[], Any], count: int) -> float:
    """CPU milliseconds of one call, the best of five rounds of `count`."""
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(count):
            call()
        rounds.append((time.process_time() - started) / count * 1000)
    return min(rounds)
