"""Threads that compute masks, also in a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graftlm.core.grammar.masks import workers


def test_work_is_done_on_another_thread() -> None:
    done, threads = threading.Event(), []

    def work() -> str:
        threads.append(threading.get_ident())
        done.set()
        return "done"

    task = workers.masks.submit(work)
    assert done.wait(120)
    assert task.result() == "done"
    assert threads != [threading.get_ident()] and len(threads) == 1


def test_who_asks_before_a_thread_has_begun_does_the_work() -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> bool:
        begun.release()
        return go.wait(120)

    held = [workers.masks.submit(hold) for _ in range(workers.masks.count)]
    assert all(begun.acquire(timeout=120) for _ in held)
    task = workers.masks.submit(threading.get_ident)
    assert task.result() == threading.get_ident()
    go.set()
    assert all(one.result() for one in held)
    assert task.result() == threading.get_ident()


def test_each_task_is_done_once_and_its_error_is_for_all_who_ask() -> None:
    calls: list[int] = []

    def work(i: int) -> int:
        calls.append(i)
        if i % 7 == 0:
            raise ValueError(i)
        return i

    for task, i in [(workers.masks.submit(work, i), i) for i in range(500)]:
        for _ in range(2):
            if i % 7:
                assert task.result() == i
            else:
                with pytest.raises(ValueError, match=f"^{i}$"):
                    task.result()
    assert sorted(calls) == list(range(500))


def test_threads_that_had_nothing_to_do_take_new_work() -> None:
    for _ in range(50):
        done = [threading.Event() for _ in range(20)]
        for event in done:
            workers.masks.submit(event.set)
        assert all(event.wait(120) for event in done)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_has_threads_of_its_own() -> None:
    code = """
import os
from graftlm.core.grammar.masks import workers
workers.masks.submit(divmod, 7, 2).result()
if os.fork() == 0:
    os._exit(workers.masks.submit(divmod, 7, 2).result() != (3, 1))
print(os.wait()[1])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.split() == ["0"], done.stderr
