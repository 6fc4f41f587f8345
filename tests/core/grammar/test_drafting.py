"""Processes that compile: what they make, what happens when one ends, and that none outlives who started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import drafting
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.drafting import DraftingProcesses
from graftlm.core.grammar.spec import JsonSchema, Limits, Options, Regex
from tests.grammars import BYTES, allows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

BEGIN = """
import os, sys
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.drafting import DraftingProcesses
from graftlm.core.grammar.spec import Regex
from tests.grammars import BYTES
processes = DraftingProcesses(2)
cache = GrammarCache(processes=processes)
processes.start()
processes.wait()
"""


@pytest.fixture
def processes() -> Iterator[DraftingProcesses]:
    found = DraftingProcesses(2)
    found.start()
    found.wait()
    yield found
    found.close()


def _children(processes: DraftingProcesses) -> list[int]:
    assert processes._helper is not None
    path = Path(f"/proc/{processes._helper.pid}/task/{processes._helper.pid}/children")
    return list(map(int, path.read_text().split()))


def _script(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", BEGIN + code], stdin=pipe, stdout=pipe, text=True, env=environment)


def test_a_cache_has_processes_compile_as_soon_as_they_are_ready(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    names = [f"field{i}" for i in range(12)]
    schemas = [JsonSchema({"type": "object", "properties": {name: {"type": "boolean"}}}) for name in names]
    futures = [cache.submit(schema, BYTES) for schema in schemas]
    for name, future in zip(names, futures, strict=True):
        assert allows(future.result(60), f'{{"{name}":true}}')
    assert processes.num_drafted == 12
    with pytest.raises(GrammarError, match="unknown type 'strin'") as caught:
        cache.get(JsonSchema({"type": "strin"}), BYTES)
    assert caught.value.pointer == "/type"
    cache.close()


def test_a_process_is_at_its_next_constraint_while_somebody_is_told_of_the_last(processes: DraftingProcesses) -> None:
    at_work: list[int] = []
    told, all_asked = threading.Semaphore(0), threading.Event()

    def done(answer: object) -> None:
        at_work.append(len(processes._at_work))
        told.release()

    processes.submit(Regex("b"), Options(), lambda answer: all_asked.wait(60))  # nobody is told before all are asked
    for i in range(6):
        processes.submit(Regex(f"a{{{i},}}"), Options(), done)
    all_asked.set()
    for _ in range(6):
        assert told.acquire(timeout=60)
    assert at_work[:2] == [2, 2]


def test_a_cache_that_is_closed_finishes_what_the_processes_are_at(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    schema = {"type": "object", "properties": {"a": {"type": "object"}}}
    future = cache.submit(JsonSchema(schema), BYTES)  # which llguidance finishes
    cache.close()
    assert future.done() and allows(future.result(), '{"a":{}}')
    with pytest.raises(RuntimeError, match="after shutdown"):
        cache.submit(Regex("a"), BYTES)


def test_a_process_that_was_killed_costs_no_constraint(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    for number, child in enumerate(_children(processes), 1):
        os.kill(child, signal.SIGKILL)
        for i in range(4):
            assert allows(cache.get(Regex(f"a{number}{i}"), BYTES), f"a{number}{i}")
    assert not processes.ready
    assert allows(cache.get(Regex("b"), BYTES), "b")
    cache.close()


def test_a_process_that_hangs_costs_no_constraint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_PATIENCE_S", 1.0)
    processes = DraftingProcesses(2)
    processes.start()
    processes.wait()
    cache = GrammarCache(processes=processes)
    children = _children(processes)
    for child in children:
        os.kill(child, signal.SIGSTOP)
    try:
        notes = [f"{i}" + "x" * 500_000 * (i < 2) for i in range(5)]  # more than a pipe holds
        schemas = [JsonSchema({"type": "boolean", "description": note}) for note in notes]
        for future in [cache.submit(schema, BYTES, limits=Limits(seconds=0.1)) for schema in schemas]:
            assert allows(future.result(60), "true")
        assert not processes.ready
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        cache.close()
        processes.close()


def test_more_constraints_than_processes_wait_their_turn_and_all_end_when_the_processes_are_closed(
    processes: DraftingProcesses,
) -> None:
    cache = GrammarCache(processes=processes)
    futures = [cache.submit(Regex(f"[a-z]{{2,9}}{i}"), BYTES) for i in range(200)]
    futures[0].result(60)
    processes.close()
    for i, future in enumerate(futures):
        assert allows(future.result(60), f"abc{i}")
    assert 0 < processes.num_drafted < 200
    cache.close()


def test_none_is_ready_before_the_start_or_where_there_are_to_be_none() -> None:
    none = DraftingProcesses(0)
    none.start()
    assert not none.ready and not DraftingProcesses(2).ready
    assert allows(GrammarCache(processes=none).get(Regex("a"), BYTES), "a")


def test_a_fork_compiles_by_itself_and_leaves_the_processes_to_its_parent() -> None:
    code = """
if os.fork() == 0:
    fine = not processes.ready and cache.get(Regex("child"), BYTES).engine == "fsm"
    os._exit(0 if fine else 1)
_, status = os.wait()
cache.get(Regex("parent"), BYTES)
print(status, processes.num_drafted)
"""
    with _script(code) as script:
        assert script.communicate(timeout=120)[0].split() == ["0", "1"]
        assert script.returncode == 0


def test_the_processes_end_when_the_one_that_started_them_is_killed() -> None:
    with _script("print(processes._helper.pid, flush=True)\nsys.stdin.read()") as script:
        assert script.stdout is not None
        helper = os.pidfd_open(int(script.stdout.readline()))
        try:
            script.kill()
            ended, _, _ = select.select([helper], [], [], 60)
            assert ended == [helper]
        finally:
            os.close(helper)
