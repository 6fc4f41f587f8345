"""Hot loops: Python at first and without numba, machine code from disk as soon as it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.core.grammar.automata import determinize, jit
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.masks import self_loops
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.regex.parser import parse
from graftlm.kernels.cpu.compiled import loop_cache
from tests.core.grammar.vocabularies import bpe_vocabulary, row_at

ROOT = Path(__file__).parents[4]


def test_every_loop_is_machine_code_after_waiting() -> None:
    assert len(jit._loops) >= 8
    assert [loop.python.__name__ for loop in jit._loops if loop.machine_code is None] == []


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for loop in jit._loops:
        monkeypatch.setattr(loop, "machine_code", None)


@pytest.mark.parametrize("pattern", ["(ab|a[bc]){2,9}d", r'"([^"\\]|\\.){0,400}"', "x[a-z]{3,70}(é|yes)?"])
def test_a_loop_in_python_does_what_its_machine_code_does(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, compiled = bpe_vocabulary(), Dfa.compile(parse(pattern))
    rows = [row_at(Masks(compiled, vocabulary), (state, *compiled.start[1:])) for state in range(1, 4)]
    loops = [self_loops.self_loop(compiled, state) for state in range(1, compiled.num_states)]
    for loop in jit._loops:
        monkeypatch.setattr(loop, "machine_code", None)
    plain = Dfa.compile(parse(pattern))
    assert (plain.table == compiled.table).all() and (plain.distance == compiled.distance).all()
    assert (plain.actions == compiled.actions).all()
    for state, row in enumerate(rows, 1):
        assert (row_at(Masks(plain, vocabulary), (state, *plain.start[1:])) == row).all()
    assert [self_loops.self_loop(plain, state) for state in range(1, plain.num_states)] == loops


def test_a_construction_that_began_in_python_goes_on_as_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = "(a|b)*a(a|b){9}"
    code, calls = determinize.explore.machine_code, []

    def python(*args: object) -> int:
        calls.append(args[-1])
        if len(calls) == 3:
            monkeypatch.setattr(determinize.explore, "machine_code", code)
        return original(*args)  # type: ignore[arg-type]

    original = determinize.explore.python
    monkeypatch.setattr(determinize.explore, "machine_code", None)
    monkeypatch.setattr(determinize.explore, "python", python)
    assert Dfa.compile(parse(pattern)).num_states > 1000
    assert len(calls) == 3


SECOND_PROCESS = """
import sys
from graftlm.core.grammar.automata import jit
from graftlm.kernels.cpu.compiled import loop_cache
loop_cache.compile_one = loop_cache.start_processes = None
jit.wait()
assert all(loop.machine_code is not None for loop in jit._loops)
assert "numba" not in sys.modules
"""


def test_a_process_links_the_object_code_that_is_there_without_numba() -> None:
    assert all(loop_cache.is_ready(*name) for name in jit.wanted())
    subprocess.run([sys.executable, "-W", "error", "-c", SECOND_PROCESS], check=True, cwd=ROOT)


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


EXIT = """
import atexit, sys, time
from pathlib import Path
atexit.register(lambda: [process.kill() for process in loop_cache._processes])  # runs after the hook of jit
from graftlm.core.grammar.automata import jit
from graftlm.kernels.cpu.compiled import loop_cache, object_code
object_code.FOLDER = Path("nowhere")
jit.prepare()
while not loop_cache._processes:
    time.sleep(0.01)
print(jit._thread.is_alive(), "numba" in sys.modules)
"""


def test_an_exit_does_not_wait_for_loops_that_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(tmp_path))
    assert run(EXIT) == ["True False"]


FORK = """
import os, threading
from graftlm.core.grammar.automata import jit
from graftlm.kernels.cpu.compiled import loop_cache

load, began = loop_cache.load, threading.Event()

def loaded(*name):
    began.set()
    return load(*name)

loop_cache.load = loaded
threading.Thread(target=jit.prepare).start()
began.wait(60)
pid = os.fork()
jit.wait()
linked = all(loop.machine_code is not None for loop in jit._loops)
if pid == 0:
    os._exit(0 if linked else 1)
print(linked, os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_child_that_is_forked_while_loops_are_linked_used_to_run_them_as_python() -> None:
    assert run(FORK) == ["True 0"]


WITHOUT_NUMBA = """
import sys, warnings
from pathlib import Path
sys.modules["numba"] = None
warnings.simplefilter("error")
from graftlm.kernels.cpu.compiled import object_code
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.vocabulary import Vocabulary

object_code.FOLDER = Path("nowhere")
vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b"ab", b"abc", b""], eos_token_id=258)
vocabulary.prepare()
jit.wait()
matcher = FsmGrammar.compile(parse(r'name:[a-z]{1,400};(yes|no)'), vocabulary).matcher()
assert matcher.forced([]) == [*b"name:"]
assert matcher.advance([*b"name:", 257, *b"x;"]) == 8
assert bytes(matcher.ending([])) == b"no"
assert FsmGrammar.compile(parse("abc"), Vocabulary([b"ab", b"c"])).matcher().ending([]) == [0, 1]
"""


def test_the_whole_engine_runs_without_numba() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GRAFTLM_CACHE_DIR": ""}
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.stderr.count("numba is not installed") == 1
