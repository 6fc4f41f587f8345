"""Workloads in a process of the engine's own, GraftLM alone on sprout: each round begins with an empty cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu.in_process import main
from bench.workloads._suite import SHARE


def test_a_process_runs_a_workload_as_often_as_asked_with_an_empty_cache_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SHARE, "0.1")
    figures = tmp_path / "figures.json"
    assert main(["judge", "--model", "sprout", "--rounds", "2", "--json", str(figures)]) == 0
    (row,) = json.loads(figures.read_text())["rows"]
    first, second = row["engines"]["graftlm"]
    assert first["completion_tokens"] > 0 and first["wall_s"] > 0 and not first["error"]
    counts = ("requests", "prompt_tokens", "computed_tokens", "completion_tokens")
    assert [first[name] for name in counts] == [second[name] for name in counts]
    assert "judge" in capsys.readouterr().out


def test_a_process_that_ends_by_itself_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the process of graftlm has ended"):
        main(["judge", "--model", "no-such-folder/model"])


def test_a_folder_without_vllm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "sprout", "--peers", str(tmp_path)])
    assert "no site_vllm there" in capsys.readouterr().err
