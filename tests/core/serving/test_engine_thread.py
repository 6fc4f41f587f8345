from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from graftlm.core.request import Completion, Request, Submission, Usage
from graftlm.core.serving.caller_waves import GROUPS
from graftlm.core.serving.engine_thread import EngineThread
from graftlm.core.serving.stream import Answer

SCRIPT = """
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

for _ in range(2):  # one runtime that was used, one that is still at it
    runtime = Runtime(tiny_model(), tokenizer=byte_tokenizer(), dtype="float32")
    runtime.generate("a", max_tokens=2)
from graftlm.core.request import Request

future = runtime.submit(Request("b"))
print("done")
"""


def test_a_process_that_closes_no_runtime_used_to_abort_at_its_end() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Asked:
    """An engine that ends what it is given when `release` is set."""

    idle = True

    def __init__(self) -> None:
        self.release = threading.Event()

    def add(self, submissions: Sequence[Submission]) -> None:
        self.release.wait(120)
        for submission in submissions:
            submission.listener.on_finish(Completion("", [], "stop", Usage()))

    def fail_all(self, error: BaseException) -> None:
        """All have ended."""

    def close(self) -> None:
        """Nothing is held."""


class Woken(Asked):
    """An engine that is woken in its first step, as by a grammar, and has something to run from the second on."""

    idle = False

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self.wake = wake
        self.num_steps = 0
        self.second = threading.Event()

    def step(self) -> bool:
        self.num_steps += 1
        if self.num_steps == 1:
            self.wake()
            return False
        self.idle = True
        self.second.set()
        return True


def test_a_wake_up_while_the_engine_steps_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.serving.engine_thread.POLL_S", 60.0)
    build: Any = Woken
    thread = EngineThread("woken", build)
    thread.start()
    thread.wait_loaded()
    engine: object = thread.engine
    assert isinstance(engine, Woken)
    assert engine.second.wait(120)
    thread.stop()
    thread.join(120)


def test_callers_that_come_back_used_to_wake_the_engine_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.serving.caller_waves.QUIET_S", 5.0)
    monkeypatch.setattr("graftlm.core.serving.caller_waves.LONGEST_S", 10.0)
    engine = Asked()
    thread = EngineThread("asked", lambda wake: engine, gathers=True)  # type: ignore[arg-type, return-value]
    first, group = ([Answer() for _ in range(num)] for num in (4 * GROUPS, 4))
    for answer in first:
        thread.add([Submission(Request("a"), answer)])
    engine.release.set()
    for answer in first:
        answer.wait()
    thread.add([Submission(Request("b"), group[0])])
    while not thread._gathering:
        time.sleep(0)
    with thread._changed:  # it waits for three more
        notify = Mock(wraps=thread._changed.notify)
        thread._changed.notify = notify  # type: ignore[method-assign]
    for answer in group[1:]:
        thread.add([Submission(Request("b"), answer)])
    for answer in group:
        answer.wait()
    assert notify.call_count == 1  # for the last
    thread.stop()
    thread.join()


class Busy(Asked):
    """An engine that always has something to run; it keeps what it is given."""

    idle = False

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Submission] = []

    def add(self, submissions: Sequence[Submission]) -> None:
        self.given += submissions

    def step(self) -> bool:
        time.sleep(0.001)
        return True


def test_an_engine_that_has_something_to_run_used_to_stop_for_callers_that_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graftlm.core.serving.caller_waves.QUIET_S", 5.0)
    monkeypatch.setattr("graftlm.core.serving.caller_waves.LONGEST_S", 10.0)
    engine = Busy()
    thread = EngineThread("busy", lambda wake: engine, gathers=True)  # type: ignore[arg-type, return-value]
    answers = [Answer() for _ in range(4 * GROUPS)]
    for answer in answers:
        thread.add([Submission(Request("a"), answer)])
    while len(engine.given) < len(answers):
        time.sleep(0.001)
    for submission in engine.given:
        submission.listener.on_finish(Completion("", [], "stop", Usage()))
    engine.given.clear()
    engine.step = steps = Mock(wraps=engine.step)  # type: ignore[method-assign]
    thread.add([Submission(Request("b"), Answer())])
    while steps.call_count < 5:
        time.sleep(0.001)
    assert not engine.given  # it is held for three more
    thread.call(lambda engine: None)  # what is no request waits for nobody
    assert len(engine.given) == 1
    thread.stop()
    thread.join()


class OnDevice(Asked):
    """An engine that waits for a device in `step`, once, after it has answered all."""

    waits_for_device = True
    device_wait = nullcontext

    def __init__(self) -> None:
        super().__init__()
        self.release.set()
        self.seen: list[list[bool]] = []
        self.answers: list[Answer] = []
        self.idle = True

    def add(self, submissions: Sequence[Submission]) -> None:
        super().add(submissions)
        self.idle = False

    def step(self) -> bool:
        self.seen.append([not answer._open.locked() for answer in self.answers])
        with self.device_wait():
            self.seen.append([not answer._open.locked() for answer in self.answers])
        self.idle = True
        return True


def test_callers_are_woken_while_the_engine_waits_for_its_device() -> None:
    engine = OnDevice()
    thread = EngineThread("device", lambda wake: engine, gathers=True)  # type: ignore[arg-type, return-value]
    thread.wait_loaded()
    thread.call(lambda engine: None)  # it has waited for a task before
    engine.answers = [Answer(chain=thread.wakes) for _ in range(2)]
    thread.add([Submission(Request("a"), answer) for answer in engine.answers])
    for answer in engine.answers:
        answer.wait()
    thread.call(lambda engine: None)
    assert engine.seen == [[False, False], [True, False]]
    thread.stop()
    thread.join()
