from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from graftlm.core.request import Completion, Request, Submission, Usage
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
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


class Asked:
    """An engine that ends what it is given when `release` is set."""

    idle = True

    def __init__(self) -> None:
        self.release = threading.Event()

    def add(self, submissions: Sequence[Submission]) -> None:
        self.release.wait(30)
        for submission in submissions:
            submission.listener.on_finish(Completion("", [], "stop", Usage()))

    def fail_all(self, error: BaseException) -> None:
        """All have ended."""

    def close(self) -> None:
        """Nothing is held."""


def test_callers_that_come_back_used_to_wake_the_engine_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.serving.caller_waves.QUIET_S", 5.0)
    monkeypatch.setattr("graftlm.core.serving.caller_waves.LONGEST_S", 10.0)
    engine = Asked()
    thread = EngineThread("asked", lambda wake: engine, gathers=True)  # type: ignore[arg-type, return-value]
    answers = [Answer() for _ in range(16)]
    for answer in answers[:8]:
        thread.add([Submission(Request("a"), answer)])
    engine.release.set()
    for answer in answers[:8]:
        answer.wait()
    thread.add([Submission(Request("b"), answers[8])])
    while not thread._gathering:
        time.sleep(0)
    with thread._changed:  # it waits for seven more
        notify = Mock(wraps=thread._changed.notify)
        thread._changed.notify = notify  # type: ignore[method-assign]
    for answer in answers[9:]:
        thread.add([Submission(Request("b"), answer)])
    for answer in answers[8:]:
        answer.wait()
    assert notify.call_count == 1  # for the last
    thread.stop()
    thread.join()
