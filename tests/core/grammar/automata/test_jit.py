"""Hot loops: Python at first and without numba, machine code from disk as soon as it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.core.grammar.automata import determinize, jit
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.masks import slices
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.regex.regex import parse
from graftlm.kernels import disk_cache
from tests.core.grammar.vocabularies import bpe_vocabulary

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
    rows = [Masks(compiled, vocabulary).row((state, *compiled.start[1:])) for state in range(1, 4)]
    loops = [slices.self_loop(compiled, state) for state in range(1, compiled.num_states)]
    for loop in jit._loops:
        monkeypatch.setattr(loop, "machine_code", None)
    plain = Dfa.compile(parse(pattern))
    assert (plain.table == compiled.table).all() and (plain.distance == compiled.distance).all()
    assert (plain.actions == compiled.actions).all()
    for state, row in enumerate(rows, 1):
        assert (Masks(plain, vocabulary).row((state, *plain.start[1:])) == row).all()
    assert [slices.self_loop(plain, state) for state in range(1, plain.num_states)] == loops


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


WITHOUT_NUMBA = """
import sys, warnings
sys.modules["numba"] = None
warnings.simplefilter("error")
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.regex.regex import parse
from graftlm.core.grammar.vocabulary import Vocabulary

vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b"ab", b"abc", b""], eos_token_id=258)
vocabulary.prepare()
matcher = FsmGrammar.compile(parse(r'name:[a-z]{1,400};(yes|no)'), vocabulary).matcher()
assert matcher.forced([]) == [*b"name:"]
assert matcher.advance([*b"name:", 257, *b"x;"]) == 8
assert bytes(matcher.ending([])) == b"no"
assert FsmGrammar.compile(parse("abc"), Vocabulary([b"ab", b"c"])).matcher().ending([]) == [0, 1]
"""


def test_the_whole_engine_runs_without_numba() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""})
