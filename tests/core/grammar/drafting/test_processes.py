"""Processes that compile: what they make, what happens when one ends, and that none outlives who started it."""

from __future__ import annotations

import errno
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.drafting import messages
from graftlm.core.grammar.drafting.draft import draft
from graftlm.core.grammar.drafting.processes import DraftingProcesses
from graftlm.core.grammar.spec import Choices, JsonSchema, Limits, Options, Regex
from tests.grammars import BYTES, allows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

BEGIN = """
import os, sys
from graftlm.core.grammar.cache import GrammarCache
from graftlm.core.grammar.drafting.processes import DraftingProcesses
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
    with _all_end(found):
        yield found
        found.close()


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.core.grammar.drafting.processes._PATIENCE_S", 1.0)


@pytest.fixture
def impatient(impatience: None, processes: DraftingProcesses) -> DraftingProcesses:
    """Processes that are given up soon."""
    return processes


@contextmanager
def _all_end(processes: DraftingProcesses) -> Iterator[None]:
    """Assert that the helper, and each process that there is now, has ended soon after the block."""
    assert processes._helper is not None
    with _end([processes._helper.pid, *_children(processes)]):
        yield


@contextmanager
def _end(pids: Iterable[int]) -> Iterator[None]:
    """Assert that each of these processes has ended soon after the block."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 60)[0] == [descriptor]
    finally:
        for descriptor in descriptors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def _children(processes: DraftingProcesses) -> list[int]:
    assert processes._helper is not None
    path = Path(f"/proc/{processes._helper.pid}/task/{processes._helper.pid}/children")
    return list(map(int, path.read_text().split()))


def _until(reached: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def _stop(child: int) -> None:
    os.kill(child, signal.SIGSTOP)
    _until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "T")


class Ends(Regex):
    """A constraint at which a process ends."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


class Hangs(Regex):
    """A constraint at which a process hangs."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.pause, ()


class Computes(Regex):
    """A constraint at which a process computes for ever."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sum, (range(10**18),)


@contextmanager
def _script(code: str, folder: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command, pipe = [sys.executable, "-P", "-c", BEGIN + code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=folder) as script:
        try:
            yield script
        finally:
            script.kill()


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


def test_processes_go_on_to_their_next_constraints_before_anybody_is_told_of_the_last(
    processes: DraftingProcesses,
) -> None:
    told, holds, all_taken = threading.Semaphore(0), threading.Event(), threading.Event()

    def hold(answer: object) -> None:
        holds.set()
        all_taken.wait(60)

    processes.submit(Regex("b"), Options(), hold)
    assert holds.wait(60)
    for i in range(20):
        processes.submit(Regex(f"a{{{i},}}"), Options(), lambda answer: told.release())
    assert processes._queue is not None
    queue = processes._queue
    _until(lambda: queue.head is None and not any(processes._numbers))
    assert not told.acquire(blocking=False)
    all_taken.set()
    for _ in range(20):
        assert told.acquire(timeout=60)
    assert processes.num_drafted == 21


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


def test_a_process_that_hangs_costs_no_constraint_and_is_ended(impatient: DraftingProcesses) -> None:
    cache = GrammarCache(processes=impatient)
    children = _children(impatient)
    with _end(children):
        for child in children:
            _stop(child)
        notes = [f"{i}" + "x" * 500_000 * (i < 2) for i in range(5)]  # more than a pipe holds
        schemas = [JsonSchema({"type": "boolean", "description": note}) for note in notes]
        for future in [cache.submit(schema, BYTES, limits=Limits(seconds=0.1)) for schema in schemas]:
            assert allows(future.result(60), "true")
        assert not impatient.ready
    cache.close()


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


def test_a_process_that_ends_while_it_drafts_costs_no_constraint(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    patterns = [f"a{i}" for i in range(20)]
    futures = [cache.submit(Ends("b"), BYTES), *[cache.submit(Regex(pattern), BYTES) for pattern in patterns]]
    for pattern, future in zip(["b", *patterns], futures, strict=True):
        assert allows(future.result(60), pattern)
    assert processes.num_drafted == 20
    _until(lambda: len(_children(processes)) == len(processes._alive) == 1)
    cache.close()


def test_processes_that_are_killed_while_they_draft_and_many_wait_cost_no_constraint(
    processes: DraftingProcesses,
) -> None:
    cache = GrammarCache(processes=processes)
    patterns = [f"a{i}" for i in range(20)]
    futures = [cache.submit(Hangs("b"), BYTES), cache.submit(Hangs("c"), BYTES)]
    futures += [cache.submit(Regex(pattern), BYTES) for pattern in patterns]
    _until(lambda: all(processes._numbers))
    for child in _children(processes):
        os.kill(child, signal.SIGKILL)
    for pattern, future in zip(["b", "c", *patterns], futures, strict=True):
        assert allows(future.result(60), pattern)
    assert not processes.ready and not processes.num_drafted
    cache.close()


@pytest.mark.parametrize("kind", [Hangs, Computes])
def test_one_that_a_constraint_holds_up_used_to_stay_for_ever_after_it_was_given_up(
    impatient: DraftingProcesses, kind: type[Regex]
) -> None:
    cache = GrammarCache(processes=impatient)
    held_up = cache.submit(kind("b"), BYTES, limits=Limits(seconds=0.1))
    _until(lambda: any(impatient._numbers))
    (child,) = [child for child, number in zip(_children(impatient), impatient._numbers, strict=True) if number]
    with _end([child]):
        assert allows(cache.get(Regex("a"), BYTES), "a")
        assert impatient.num_drafted == 1
        assert allows(held_up.result(60), "b")
    assert allows(cache.get(Regex("c"), BYTES), "c")
    assert impatient.num_drafted == 2 and len(impatient._alive) == 1
    cache.close()


def test_what_waits_for_a_process_that_is_given_up_waits_on_for_the_others(impatient: DraftingProcesses) -> None:
    cache = GrammarCache(processes=impatient)
    hanging = cache.submit(Hangs("a"), BYTES)
    _until(lambda: any(impatient._numbers))
    (idle,) = [place for place, number in enumerate(impatient._numbers) if not number]
    child = _children(impatient)[idle]
    _stop(child)
    with _end([child]):
        future = cache.submit(Regex("b"), BYTES)
        _until(lambda: len(impatient._alive) == 1)
        assert not future.done()
    impatient.close()
    assert allows(hanging.result(60), "a") and allows(future.result(60), "b")
    cache.close()


def test_when_the_helper_is_killed_the_processes_end_and_what_they_were_at_is_compiled_here(
    processes: DraftingProcesses,
) -> None:
    cache = GrammarCache(processes=processes)
    futures = {text: cache.submit(kind(text), BYTES) for kind, text in ((Computes, "a"), (Hangs, "b"))}
    _until(lambda: all(processes._numbers))
    _stop(_children(processes)[1])
    assert processes._helper is not None
    processes._helper.kill()
    assert all(allows(future.result(60), text) for text, future in futures.items())
    _until(lambda: not processes.ready)
    cache.close()


def test_a_task_is_answered_once(processes: DraftingProcesses) -> None:
    answers: SimpleQueue[object] = SimpleQueue()
    processes.submit(Regex("a"), Options(), answers.put)
    processes.submit(Regex("b"), Options(), answers.put)
    found = [answers.get(timeout=60), answers.get(timeout=60)]
    for number in (1, 2):
        processes._tell(number, None)  # as where a process that was taken for lost answers after all
    assert answers.empty() and None not in found
    assert processes.num_drafted == 2


def test_long_constraints_and_large_automata_go_both_ways(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    words = ["".join(random.Random(i).choices("abcdefghijklmnop", k=40)) for i in range(300)]
    assert len(pickle.dumps(draft(Choices(words), Options()))) > 3 * messages._LONGEST_MESSAGE
    choices = [cache.submit(Choices([str(i), *words]), BYTES) for i in range(4)]
    notes = [cache.submit(JsonSchema({"const": i, "description": "x" * 3_000_000}), BYTES) for i in range(4)]
    for i, (choice, note) in enumerate(zip(choices, notes, strict=True)):
        assert allows(choice.result(60), words[-1]) and allows(note.result(60), str(i))
    assert processes.num_drafted == 8
    cache.close()


def test_more_constraints_than_the_queue_holds_are_all_drafted(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    children = _children(processes)
    for child in children:
        _stop(child)
    notes = [f"{i}" + "x" * 6_000 for i in range(400)]
    futures = [cache.submit(JsonSchema({"type": "boolean", "description": note}), BYTES) for note in notes]
    assert processes._waiting
    for child in children:
        os.kill(child, signal.SIGCONT)
    assert all(allows(future.result(60), "true") for future in futures)
    assert processes.num_drafted == 400
    cache.close()


def test_long_constraints_are_compiled_where_no_descriptor_is_left_for_them(
    processes: DraftingProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(name: str) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    cache = GrammarCache(processes=processes)
    long = [JsonSchema({"const": i, "description": "x" * 100_000}) for i in range(3)]
    for i, future in enumerate([cache.submit(schema, BYTES) for schema in long]):
        assert allows(future.result(60), str(i))
    assert allows(cache.get(Regex("a"), BYTES), "a")
    assert processes.num_drafted == 1
    cache.close()


def test_closing_waits_for_no_process_that_hangs(processes: DraftingProcesses) -> None:
    cache = GrammarCache(processes=processes)
    futures = [cache.submit(kind(f"{kind.__name__}{i}"), BYTES) for i in range(3) for kind in (Hangs, Regex)]
    _until(lambda: all(processes._numbers))
    processes.close()
    assert all(future.result(60).engine == "fsm" for future in futures)
    assert not processes.ready
    cache.close()


def test_none_is_ready_before_the_start_or_where_there_are_to_be_none() -> None:
    none = DraftingProcesses(0)
    none.start()
    assert not none.ready and not DraftingProcesses(2).ready
    assert allows(GrammarCache(processes=none).get(Regex("a"), BYTES), "a")


def test_a_fork_compiles_by_itself_and_leaves_the_processes_to_its_parent() -> None:
    code = """
if os.fork() == 0:
    processes.wait()  # used to wait for the parent's
    fine = not processes.ready and cache.get(Regex("child"), BYTES).engine == "fsm"
    os._exit(0 if fine else 1)
_, status = os.wait()
cache.get(Regex("parent"), BYTES)
print(status, processes.num_drafted)
"""
    with _script(code) as script:
        assert script.communicate(timeout=120)[0].split() == ["0", "1"]
        assert script.returncode == 0


def test_processes_used_to_import_what_lay_in_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError")
    with _script("print(processes.ready)", tmp_path) as script:
        assert script.communicate(timeout=120)[0].split() == ["True"]


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "sys.exit()", "os.execv('/bin/true', ['true'])"])
def test_the_processes_end_with_the_one_that_started_them_whatever_all_are_at(ends: str) -> None:
    code = f"""
from tests.core.grammar.drafting.test_processes import Computes, Hangs, _children, _until
print(processes._helper.pid, *_children(processes), flush=True)
for kind in (Computes, Hangs):
    cache.submit(kind(kind.__name__), BYTES)
_until(lambda: all(processes._numbers))
sys.stdin.readline()
{ends}
"""
    with _script(code) as script:
        assert script.stdin is not None and script.stdout is not None
        with _end(map(int, script.stdout.readline().split())):
            script.communicate("\n", timeout=120)


def test_the_processes_end_with_the_one_that_started_them_though_a_fork_that_python_did_not_see_goes_on() -> None:
    code = """
import ctypes, signal
from tests.core.grammar.drafting.test_processes import _children
fork = ctypes.PyDLL(None).fork()
if fork == 0:
    signal.pause()
print(fork, processes._helper.pid, *_children(processes), flush=True)
sys.stdin.readline()
"""
    with _script(code) as script:
        assert script.stdout is not None
        fork, *pids = map(int, script.stdout.readline().split())
        try:
            with _end(pids):
                script.kill()
        finally:
            os.kill(fork, signal.SIGKILL)


def test_the_processes_outlive_the_thread_that_started_them_and_forks_that_end() -> None:
    code = """
import threading
other = DraftingProcesses(1)
starter = threading.Thread(target=other.start)
starter.start()
starter.join()
other.wait()
fork = os.fork()
if fork == 0:
    other.close()
    sys.exit()
os.waitpid(fork, 0)
GrammarCache(processes=other).get(Regex("a"), BYTES)
cache.get(Regex("a"), BYTES)
print(other.num_drafted, processes.num_drafted)
"""
    with _script(code) as script:
        assert script.communicate(timeout=120)[0].split() == ["1", "1"]
        assert script.returncode == 0


def test_a_helper_that_is_getting_ready_ends_too() -> None:
    code = """
other = DraftingProcesses(1)
other.start()
print(other._helper.pid, processes._helper.pid, flush=True)
sys.stdin.readline()
os._exit(0)
"""
    with _script(code) as script:
        assert script.stdout is not None
        with _end(map(int, script.stdout.readline().split())):
            script.communicate("\n", timeout=120)
