"""The guard over the workloads, and the page that is written from its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import page
from bench.workloads import _suite


def rows(low: float, value: float, high: float) -> list[dict[str, Any]]:
    ratio = {"value": value, "low": low, "high": high}
    return [{"workload": "judge", "framework": "native", "share": 0.25, "threads": 1, "cpu_ratio": ratio}]


@pytest.mark.parametrize(("now", "num_lost"), [((1.0, 1.2, 1.4), 1), ((1.0, 1.6, 2.1), 0), ((3.0, 4.0, 5.0), 0)])
def test_a_ratio_is_lost_only_beyond_both_intervals(now: tuple[float, float, float], num_lost: int) -> None:
    assert len(_suite.lost(rows(*now), rows(2.0, 2.5, 3.0))) == num_lost


def test_a_row_is_compared_over_the_engine_that_is_the_best_other_one_now() -> None:
    before = rows(2.0, 2.5, 3.0)[0] | {"best": "llama-cpp"}
    before["engines"] = {"hf": {"cpu_s": [6.0] * 3}, "llama-cpp": {"cpu_s": [2.5] * 3}, "graftlm": {"cpu_s": [1.0] * 3}}
    now = rows(4.0, 4.5, 5.0)[0] | {"best": "hf"}  # llama.cpp is not installed any more, and hf was 6 times slower
    assert _suite.lost([now], [before]) == ["judge in native: 4.50x (4.00 to 5.00), before 6.00x (5.44 to 6.62)"]


def test_only_the_engine_that_was_the_fastest_before_is_measured_against() -> None:
    before = {"engines": {"hf": {"wall_s": [5.0]}, "hf-batching": {"wall_s": [4.0]}, "llama-cpp": {"wall_s": [1.0]}}}
    assert _suite.fastest(["hf", "hf-batching"], before) == ["hf-batching"]  # llama.cpp is not installed now
    assert _suite.fastest(["hf", "hf-batching"], None) == ["hf", "hf-batching"]
    assert _suite.fastest(["vllm"], before) == ["vllm"]


def test_a_row_that_has_no_ratio_any_more_is_lost() -> None:
    failed = [rows(0, 0, 0)[0] | {"engines": {"graftlm": {"error": "no memory"}}}]
    del failed[0]["cpu_ratio"]
    assert "no memory" in _suite.lost(failed, rows(2.0, 2.5, 3.0))[0]
    assert _suite.lost(failed, []) == []


@pytest.mark.parametrize("other", [{"share": 1.0}, {"threads": 2}])
def test_a_row_of_another_size_or_with_other_threads_is_not_compared(other: dict[str, Any]) -> None:
    assert _suite.lost([rows(1.0, 1.2, 1.4)[0] | other], rows(2.0, 2.5, 3.0)) == []


def test_between_kinds_of_processors_a_ratio_may_differ_more() -> None:
    before = [rows(2.0, 2.5, 3.0)[0] | {"processor": "one"}]
    assert _suite.lost([rows(1.5, 1.6, 1.7)[0] | {"processor": "one"}], before)
    assert not _suite.lost([rows(1.5, 1.6, 1.7)[0] | {"processor": "another"}], before)
    assert _suite.lost([rows(1.2, 1.3, 1.4)[0] | {"processor": "another"}], before)


def test_a_row_that_does_not_say_its_processor_has_that_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"machine": {"processor": "one"}, "rows": [{"a": 1}, {"a": 2, "processor": "another"}]}))
    assert [one["processor"] for one in _suite._read(path)] == ["one", "another"]


def test_rows_of_earlier_runs_stay_unless_measured_again(tmp_path: Path) -> None:
    old, new = (one | {"processor": "one"} for one in (rows(1.0, 1.2, 1.4)[0], rows(2.0, 2.5, 3.0)[0]))
    for written in ([old, old | {"share": 1.0}, old | {"processor": "two"}], [new]):
        _suite._write(tmp_path / "figures.json", written)
    kept = json.loads((tmp_path / "figures.json").read_text())["rows"]
    found = [(one["processor"], one["share"], one["cpu_ratio"]["value"]) for one in kept]
    assert found == [("one", 1.0, 1.2), ("one", 0.25, 2.5), ("two", 0.25, 1.2)]


def test_rows_of_the_same_processor_are_compared_where_there_are_some() -> None:
    before = [rows(2.0, 2.5, 3.0)[0] | {"processor": name} for name in ("one", "two", "three")]
    assert [one["processor"] for one in _suite.rows_for(before, "two").values()] == ["two"]
    assert len(_suite.rows_for(before, "four")) == 1


def test_a_row_without_a_figure_says_why() -> None:
    figures = json.loads(_suite.BASELINE.read_text())
    engines = {"hf": {"error": "ModuleNotFoundError: no such package"}}
    bare = {
        "workload": "judge",
        "framework": "dspy",
        "share": 0.25,
        "threads": 1,
        "differences": ["hf failed."],
        "engines": engines,
    }
    section = page.workloads(figures | {"rows": [bare]})
    assert "hf: ModuleNotFoundError: no such package" in section and "judge in dspy: hf failed." in section


def test_there_are_twelve_workloads_each_as_a_program_or_in_dspy() -> None:
    assert len(_suite.names()) == 12
    assert all(_suite.frameworks(name)[0] == "native" for name in _suite.names())


def test_the_page_is_the_one_of_the_committed_figures() -> None:
    assert [path.name for path, (old, new) in page.pages().items() if old != new] == []


def test_a_change_of_a_figure_changes_the_page() -> None:
    figures = json.loads(_suite.BASELINE.read_text())
    figures["rows"][0]["cpu_ratio"]["value"] = 123.45
    assert "123.45x" in page.written(page.NOTES.read_text(), page.workloads(figures))
    (row, *_) = (one for one in figures["rows"] if (one["share"], one["framework"]) == (1.0, "native"))
    row["ratio"]["value"] = 54.32
    assert "54.32x" in page.written(page.PAGE.read_text(), page.summary(figures))


def test_the_mean_over_transformers_says_in_how_many_rows_it_ran() -> None:
    wall = {"graftlm": {"wall_s": [1.0]}, "llama-cpp": {"wall_s": [2.0]}}
    one = rows(2.0, 2.0, 2.0)[0] | {"ratio": rows(2.0, 2.0, 2.0)[0]["cpu_ratio"], "best_hit_rate": None}
    both = [one | {"engines": wall}, one | {"engines": wall | {"hf": {"wall_s": [4.0]}}}]
    assert "hf and hf-batching, in 1 rows that have one: 4.00x" in page._sums(both)[1]
    assert "hf and hf-batching: 4.00x" in page._sums(both[1:])[1]
