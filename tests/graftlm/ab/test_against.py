from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftlm.ab.against import changes, read_report
from graftlm.core.errors import ConfigError


def reported(low: float, value: float, high: float, engine: str = "graftlm") -> list[dict[str, Any]]:
    run = {"engine": engine, "answers": 3, "equal": 3, "computed_tokens": 1200}
    run |= {"ratio": value, "ratio_low": low, "ratio_high": high}
    return [{"pipeline": "city", "runs": [{"engine": "hf", "answers": 3}, run]}]


@pytest.mark.parametrize(
    ("now", "verdict"),
    [((1.0, 1.5, 1.9), "slower"), ((2.5, 3.0, 3.4), "faster"), ((1.8, 2.0, 2.6), "no change")],
)
def test_a_change_is_one_only_beyond_both_intervals(now: tuple[float, float, float], verdict: str) -> None:
    (change,) = changes(reported(2.0, 2.2, 2.4), reported(*now))
    assert change.verdict == verdict
    assert change.cells()[:3] == ("city", "graftlm", "2.20x (2.00 to 2.40)")
    assert change.cells()[-4:] == ("3/3", "3/3", "1,200", "1,200")


def test_without_an_interval_nothing_is_claimed() -> None:
    old = reported(2.0, 2.2, 2.4)
    old[0]["runs"][1]["ratio_low"] = None
    assert changes(old, reported(1.0, 1.0, 1.0))[0].verdict == "unknown"


def test_reports_that_share_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match="other pipelines or engines: city on hf, city on vllm"):
        changes(reported(1, 2, 3, "vllm"), reported(1, 2, 3))


def test_a_folder_without_a_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no report.json that can be read; give the folder of an earlier"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps([{"a": 1}]))
    with pytest.raises(ConfigError, match="has no report.json that can be read"):
        read_report(tmp_path)
