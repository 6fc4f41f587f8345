"""The thread that runs all programs: what one of them does ends no other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

import pytest

from graftlm.core.errors import EngineError
from graftlm.core.program.interpreter import Call, Interpreter
from graftlm.core.request import Completion, Request, Usage

LIMIT_S = 60


class Picky:
    """Answers all prompts but "bad"."""

    tokenizer: Any = None
    model_name = "picky"

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        if any(request.prompt == "bad" for request in requests):
            raise EngineError("bad")
        futures: list[Future[Completion]] = [Future() for _ in requests]
        for request, future in zip(requests, futures, strict=True):
            future.set_result(Completion(request.prompt.upper(), [], "stop", Usage()))
        return futures

    def warm(self, prefix: Any) -> Any:
        raise NotImplementedError

    def check_may_wait(self, name: str) -> None:
        raise NotImplementedError


def test_a_call_that_is_not_taken_used_to_end_those_of_other_programs() -> None:
    interpreter, backend, ended = Interpreter(), Picky(), dict[str, Future[Any]]()
    over = Event()

    def call(name: str) -> Call:
        def done(future: Future[Any]) -> None:
            ended[name] = future
            if len(ended) == 3:
                over.set()

        return Call(backend, [Request(name)], lambda futures: futures[0], done)

    interpreter.post(lambda: interpreter.call_all([call(name) for name in ("a", "bad", "c")]))
    assert over.wait(LIMIT_S)
    assert (ended["a"].result().text, ended["c"].result().text) == ("A", "C")
    assert isinstance(ended["bad"].exception(), EngineError)


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_a_step_that_raises_does_not_end_the_thread(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise kind("a step")

    interpreter, over = Interpreter(), Event()
    interpreter.post(fail)
    interpreter.post(over.set)
    assert over.wait(LIMIT_S)
    assert "a step" in caplog.text
