"""Rows that could begin wait a little for those whose grammars are being compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graftlm.core.scheduling.grammar_waves import LONGEST_S, QUIET_S, GrammarWaves


def row(num_left: int = 1, *, constrained: bool = True) -> Any:
    progress = SimpleNamespace(num_computed=20 - num_left)
    return SimpleNamespace(grammar=object() if constrained else None, num_prompt_tokens=20, progress=progress)


def scheduler(*running: Any, waiting: int = 0) -> Any:
    return SimpleNamespace(running=list(running), waiting=[row() for _ in range(waiting)])


def test_rows_wait_while_grammars_come_and_no_longer_than_that() -> None:
    waves, rows = GrammarWaves(), scheduler(row(), row())
    assert waves.hold(rows, 3, 10.0) and waves.poll_s == pytest.approx(QUIET_S)
    assert waves.hold(rows, 2, 10.0 + 0.9 * QUIET_S)
    assert waves.hold(rows, 2, 10.0 + 1.8 * QUIET_S)  # the second came at 0.9
    assert not waves.hold(rows, 2, 10.0 + 2 * QUIET_S) and waves.poll_s is None
    assert not waves.hold(scheduler(row(0), row()), 2, 10.1)


def test_nobody_waits_longer_however_many_grammars_come() -> None:
    waves, now, num_compiling = GrammarWaves(), 10.0, 1000
    while waves.hold(scheduler(row()), num_compiling, now):
        now, num_compiling = now + QUIET_S / 2, num_compiling - 1
    assert now == pytest.approx(10.0 + LONGEST_S, abs=QUIET_S)


@pytest.mark.parametrize(
    "rows",
    [
        scheduler(row(), row(0)),  # one decodes
        scheduler(row(), row(9)),  # a prompt can run
        scheduler(row(), row(constrained=False)),
        scheduler(row(), waiting=1),
    ],
)
def test_nobody_waits_where_something_else_can_run(rows: Any) -> None:
    assert not GrammarWaves().hold(rows, 5, 10.0)


def test_nobody_waits_for_no_grammar() -> None:
    assert not GrammarWaves().hold(scheduler(row()), 0, 10.0)
