"""The tests of grammars run on machine code; those that mean the loops in Python say so."""

from __future__ import annotations

import pytest

from graftlm.core.grammar.automata import jit


@pytest.fixture(scope="session", autouse=True)
def compiled_loops() -> None:
    jit.wait()
