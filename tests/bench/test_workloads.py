"""The guard over the workloads, and the page that is written from its figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import page
from bench.workloads import _suite


def rows(low: float, value: float, high: float) -> list[dict[str, Any]]:
    return [{"workload": "judge", "framework": "native", "cpu_ratio": {"value": value, "low": low, "high": high}}]


@pytest.mark.parametrize(("now", "num_lost"), [((1.0, 1.2, 1.4), 1), ((1.0, 1.6, 2.1), 0), ((3.0, 4.0, 5.0), 0)])
def test_a_ratio_is_lost_only_beyond_both_intervals(now: tuple[float, float, float], num_lost: int) -> None:
    assert len(_suite.lost(rows(*now), rows(2.0, 2.5, 3.0))) == num_lost


def test_a_row_that_has_no_ratio_any_more_is_lost() -> None:
    failed = [{"workload": "judge", "framework": "native", "engines": {"graftlm": {"error": "no memory"}}}]
    assert "no memory" in _suite.lost(failed, rows(2.0, 2.5, 3.0))[0]
    assert _suite.lost(failed, []) == []


def test_there_are_twelve_workloads_each_as_a_program_or_in_dspy() -> None:
    assert len(_suite.names()) == 12
    assert all(_suite.frameworks(name)[0] == "native" for name in _suite.names())


def test_the_page_is_the_one_of_the_committed_figures() -> None:
    figures = json.loads(_suite.BASELINE.read_text())
    assert page.PAGE.read_text() == page.written(page.PAGE.read_text(), figures)


def test_a_change_of_a_figure_changes_the_page() -> None:
    figures = json.loads(_suite.BASELINE.read_text())
    figures["rows"][0]["cpu_ratio"]["value"] = 123.45
    assert "123.45x" in page.written(page.PAGE.read_text(), figures)
