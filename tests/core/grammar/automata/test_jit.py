"""Compiled loops: kept on disk where that can be, and plain Python without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core import caching

from graftlm.core.grammar.automata import jit


def doubled(x: int) -> int:
    return 2 * x


def test_a_function_is_compiled() -> None:
    assert jit.jit(doubled)(21) == 42


def test_without_a_folder_for_compiled_code_it_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(doubled)
    assert jit.jit(doubled)(21) == 42


def test_without_numba_the_function_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "COMPILED", False)
    assert jit.jit(doubled) is doubled


WITHOUT_NUMBA = """
import sys, warnings
sys.modules["numba"] = None
warnings.simplefilter("error")
from graftlm.core.grammar.engines.fsm import FsmGrammar, warm_up
from graftlm.core.grammar.regex.regex import parse
from graftlm.core.grammar.vocabulary import Vocabulary

vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b"ab", b"abc", b""], eos_token_id=258)
warm_up(vocabulary)
matcher = FsmGrammar.compile(parse(r'name:[a-z]{1,400};(yes|no)'), vocabulary).matcher()
assert matcher.forced([]) == [*b"name:"]
assert matcher.advance([*b"name:", 257, *b"x;"]) == 8
assert bytes(matcher.ending([])) == b"no"
assert FsmGrammar.compile(parse("abc"), Vocabulary([b"ab", b"c"])).matcher().ending([]) == [0, 1]
"""


def test_the_whole_engine_runs_without_numba() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True, cwd=Path(__file__).parents[4])
