"""A backend that answers by rule, for tests of what happens around the model rather than in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from graftlm.core.request import Chunk, Completion, Request, TokenLogprob, Usage
from graftlm.core.text.processor import TextProcessor
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer

Rule = Callable[[str], str | Exception]


class Scripted:
    """Answers each prompt with `rule(prompt text)`: the text it continues with, or the error it fails with.

    held     answers wait until `release()`.
    prompts  the texts of all prompts so far;  batches  how many requests each submission had.
    Scored tokens get minus their id as log-probability.
    """

    model_name = "scripted"

    def __init__(self, rule: Rule = lambda prompt: "!", *, held: bool = False, tokenizer: Any = None) -> None:
        self.tokenizer = Tokenizer.from_hf(tokenizer or byte_tokenizer())
        self.processor = TextProcessor(self.tokenizer)
        self.rule = rule
        self.requests: list[Request] = []
        self.batches: list[int] = []
        self.warmed: list[str] = []
        self.unpinned = 0
        self.futures: list[Future[Completion]] = []
        self._released = threading.Event()
        self._waiting: list[tuple[Request, Future[Completion]]] = []
        self._lock = threading.Condition()
        if not held:
            self._released.set()

    @property
    def prompts(self) -> list[str]:
        return [self._text(request) for request in self.requests]

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._lock:
            self._lock.notify_all()
            self.batches.append(len(requests))
            self.requests.extend(requests)
            self.futures.extend(futures)
            pairs = list(zip(requests, futures, strict=True))
            if not self._released.is_set():
                self._waiting.extend(pairs)
                return futures
        for request, future in pairs:
            self._answer(request, future)
        return futures

    def wait_for(self, num_requests: int) -> None:
        """Wait until so many requests have been submitted."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.requests) >= num_requests, timeout=120)

    def release(self) -> None:
        """Give the answers that were held, and all later ones at once."""
        with self._lock:
            self._released.set()
            waiting, self._waiting = self._waiting, []
        for request, future in waiting:
            self._answer(request, future)

    def warm(self, prefix: Any) -> Scripted:
        self.warmed.append(self.tokenizer.decode(prefix, skip_special=False))
        return self

    def check_may_wait(self, name: str) -> None:
        """It has no thread."""

    def unpin(self) -> None:
        self.unpinned += 1

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.prompt.ids, skip_special=False)

    def _answer(self, request: Request, future: Future[Completion]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        usage = Usage(len(request.prompt), 0, 1)
        if request.score_ids is not None:
            scores = [TokenLogprob(i, "", -float(i)) for i in request.score_ids]
            future.set_result(Completion("", request.score_ids, "stop", usage, scores))
            return
        text = self.rule(self._text(request))
        if isinstance(text, Exception):
            future.set_exception(text)
            return
        if request.on_chunk is not None:
            for character in text:
                request.on_chunk(Chunk(character, []))
        answers = [
            Completion(f"{text}{i or ''}", self.tokenizer.encode_continuation(text), "stop", usage)
            for i in range(request.sampling.n)
        ]
        many = answers if request.sampling.n > 1 else []
        future.set_result(Completion(answers[0].text, answers[0].token_ids, "stop", usage, completions=many))
