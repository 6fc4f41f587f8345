"""The tests of grammars run on machine code that checks its arguments, unless a test runs the loops in Python."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.automata import jit


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    jit._checks = True
    jit.wait()
