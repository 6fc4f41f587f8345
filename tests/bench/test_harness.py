"""Measurements: pairing, ratios, floors, and what a written report says about where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import harness
from bench.harness import Options, Row, Timing


def test_paired_runs_take_turns() -> None:
    order: list[str] = []
    times = harness.paired({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3  # one warm-up of each, then the two repeats
    assert [len(timing.samples) for timing in times.values()] == [2, 2]


def test_a_rate_is_compared_pair_by_pair() -> None:
    row = harness.rate_row("decode", "batch 1", "tok/s", 100, Timing((1.0, 2.0, 4.0)), Timing((2.0, 6.0, 4.0)))
    assert (row.value, row.baseline, row.ratio) == (50, 25, 2.0)
    assert (row.low, row.high) == (25, 100)


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (Row("c", "w", 5, "s"), None),
        (Row("c", "w", 5, "s", floor=5), True),
        (Row("c", "w", 4, "s", floor=5), False),
        (Row("c", "w", 4, "s", floor=5, at_most=True), True),
        (Row("c", "w", 4, "s", ratio=6, floor=5), True),
    ],
)
def test_a_floor_is_of_the_ratio_where_there_is_one(row: Row, reached: bool | None) -> None:
    assert row.reached is reached


def test_quick_chooses_the_small_run() -> None:
    assert (Options(quick=True).choose(1, 2), Options().choose(1, 2)) == (1, 2)


def test_every_case_of_every_group_can_be_imported() -> None:
    for package in ("runtime", "frameworks", "grammar"):
        for name, module in harness.cases(package).items():
            assert callable(__import__(module, fromlist=["run"]).run), name


def test_a_report_says_command_commit_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    harness.main("runtime", ["startup", "--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    assert {"command", "commit", "at", "machine", "rows"} <= set(report)
    assert report["rows"][0]["what"] == "import graftlm"


def test_a_row_is_shown_as_soon_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: Options) -> Iterator[Row]:
        yield Row("c", "calls", 2, "calls", 6, ratio=3.0)
        assert "c: calls: 2 calls (baseline 6), 3.00x\n" in capsys.readouterr().err

    monkeypatch.setattr(harness.importlib, "import_module", lambda name: SimpleNamespace(run=run))
    assert harness.main("remote", ["fields"]) == 0


def test_the_start_of_a_name_stands_for_all_cases_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def load(module: str) -> SimpleNamespace:
        return SimpleNamespace(run=lambda options: ran.append(module) or [])

    monkeypatch.setattr(harness.importlib, "import_module", load)
    harness.main("frameworks", ["langchain", "batch"])
    assert [name.removeprefix("bench.frameworks.") for name in ran] == [
        "langchain_agent",
        "langchain_batch",
        "langchain_extraction",
        "batch",
    ]


def test_an_unknown_case_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        harness.main("runtime", ["speed"])
    assert "no case 'speed'; known: ageing, " in capsys.readouterr().err
