"""Hot loops: Python at first and without numba, machine code from disk as soon as it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.core.grammar.automata import determinize, jit
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.masks.walks import self_loops
from graftlm.core.grammar.regex.parser import parse
from graftlm.kernels import disk_cache
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
from graftlm.core.grammar.automata import jit
jit._compile_elsewhere = lambda folder: 1 / 0
jit.wait()
assert all(loop.machine_code is not None for loop in jit._loops)
"""


def test_a_later_process_loads_what_an_earlier_one_compiled(tmp_path: Path) -> None:
    folder = jit._folder()
    assert folder is not None and disk_cache.is_intact(folder)
    subprocess.run([sys.executable, "-W", "error", "-c", SECOND_PROCESS], check=True, cwd=ROOT)


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


EXIT = """
import atexit, importlib, sys, threading
event = threading.Event()

@atexit.register  # before the module registers its own hook, so called after it
def last():
    event.set()
    jit._thread.join(60)
    from llvmlite.binding import common
    print("numba" in sys.modules, common._is_shutting_down())

from graftlm.core.grammar.automata import jit
"""


def test_an_exit_waits_for_numba_to_be_imported() -> None:
    script = """
import_module, began = importlib.import_module, threading.Event()

def imported(name, *package):
    if name == "numba":
        began.set()
        event.wait(60)
    return import_module(name, *package)

importlib.import_module = imported
jit.prepare()
began.wait(60)
atexit.register(event.set)  # called before that of the module
"""
    assert run(EXIT + script) == ["True True"]


def test_numba_is_not_imported_once_the_interpreter_exits() -> None:
    script = """
folder = jit._folder
jit._folder = lambda: event.wait(60) and folder()
jit.prepare()
"""
    assert run(EXIT + script)[0].startswith("False")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_child_that_is_forked_while_loops_are_loaded_used_to_run_them_as_python() -> None:
    script = """
import importlib, os, threading
from graftlm.core.grammar.automata import jit

import_module, began = importlib.import_module, threading.Event()

def imported(name, *package):
    if name == "numba":
        began.set()
    return import_module(name, *package)

importlib.import_module = imported
jit.prepare()
began.wait(60)
pid = os.fork()
jit.wait()
loaded = all(loop.machine_code is not None for loop in jit._loops)
if pid == 0:
    os._exit(0 if loaded else 1)
print(loaded, os.waitpid(pid, 0)[1])
"""
    assert run(script) == ["True 0"]


WITHOUT_NUMBA = """
import sys, warnings
sys.modules["numba"] = None
warnings.simplefilter("error")
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.vocabulary import Vocabulary

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
    command = [sys.executable, "-c", WITHOUT_NUMBA]
    done = subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}, stderr=subprocess.PIPE, text=True
    )
    assert done.stderr.count("numba is not installed") == 1
