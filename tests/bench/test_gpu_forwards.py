"""Forwards of two trees side by side, without a GPU: whose code ran, what was replayed, figures by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import forwards
from bench.gpu.card import Card, Reading, nvml_reader
from bench.gpu.forwards import check_out, compare_logits, notes, rows
from bench.gpu.one_tree import Step, measure, plan_of, replayed
from bench.harness import ROOT

PARTS = ("graftlm", "core", "adapters", "kernels", "plugins")
NEGATED = """

_build = build_runner


def build_runner(*arguments):
    spec = _build(*arguments)
    forward = spec.runner.forward
    spec.runner.forward = lambda plan: -forward(plan)
    return spec
"""


@pytest.fixture(autouse=True)
def _compiled_beside_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree has what was compiled for it; workers compile elsewhere. No process of a user interprets Triton."""
    for name in ("NUMBA_CACHE_DIR", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of this tree's library without the embedded model; what is compiled for it comes along."""
    for name in PARTS:
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, symlinks=True, ignore=lambda *_: ["sprout"])
    return tmp_path / "copy"


# ---- whose code runs ------------------------------------------------------------------------------------------------


def test_each_tree_runs_its_own_code(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copied / "core" / "engine_builder.py").open("a") as file:
        file.write(NEGATED)
    out = tmp_path / "figures.json"
    arguments = ["--tiny", "--rounds", "1", "--only", "2,p2", "--against", str(copied), "--json", str(out)]
    assert forwards.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [tree["name"] for tree in found["trees"]] == ["this tree", "copy"]
    for step in ("2", "p2"):
        here, there = (tree["runs"][0]["figures"][step] for tree in found["trees"])
        assert here["to_baseline"] == pytest.approx(2.0) and here["same_best"] == 0.0  # x and -x are 2 |x| apart
        assert there["to_baseline"] == 0.0 and there["same_best"] == 1.0
        assert min(here["ms"], there["ms"]) > 0
    assert "this tree, decode, 2 x 36: logits 2e+00 from copy, 0% the same token" in capsys.readouterr().out


def test_a_tree_that_takes_its_code_from_elsewhere_has_no_figures(tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "graftlm").symlink_to(ROOT / "graftlm")
    run = forwards.measure_tree(tmp_path / "linked", ["--tiny", "--only", "1"], tmp_path)
    assert run["figures"] == {}
    assert run["errors"] == {"start": f"graftlm came from {ROOT.resolve()} instead of {tmp_path / 'linked'}"}


def test_a_tree_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken" / "graftlm").mkdir(parents=True)
    (tmp_path / "broken" / "graftlm" / "__init__.py").write_text("raise ImportError('half a tree')\n")
    run = forwards.measure_tree(tmp_path / "broken", ["--tiny", "--only", "1"], tmp_path)
    assert run["errors"] == {"start": "the process ended with status 1"}
    assert run["log"][-1] == "ImportError: half a tree"


def repository(folder: Path) -> Path:
    """A repository of two commits, the first of them tagged; the second is changed in the working tree."""
    package = folder / "graftlm"
    package.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], cwd=folder, check=True)
    for number in (1, 2):
        (package / "__init__.py").write_text(f"number = {number}\n")
        subprocess.run([*git, "add", "."], cwd=folder, check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", str(number)], cwd=folder, check=True)
        subprocess.run([*git, "tag", f"v{number}"], cwd=folder, check=True)
    (package / "__init__.py").write_text("number = 3\n")
    return folder


def test_a_commit_is_taken_as_it_was_and_the_working_tree_stays(tmp_path: Path) -> None:
    made = repository(tmp_path / "made")
    folder, name = check_out("v1", made, tmp_path / "tree")
    assert name.startswith("v1 (") and (folder / "graftlm" / "__init__.py").read_text() == "number = 1\n"
    assert (made / "graftlm" / "__init__.py").read_text() == "number = 3\n"
    listed = subprocess.check_output(["git", "worktree", "list"], cwd=made, text=True)
    assert len(listed.splitlines()) == 1


def test_a_folder_is_taken_where_it_is(tmp_path: Path) -> None:
    made = repository(tmp_path / "made")
    assert check_out(os.fspath(made), ROOT, tmp_path / "tree") == (made, "made")
    assert not (tmp_path / "tree").exists()


def test_what_is_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="v3 is neither a commit of this repository nor a folder with graftlm in it"):
        check_out("v3", repository(tmp_path / "made"), tmp_path / "tree")
    with pytest.raises(SystemExit):
        forwards.main(["--tiny", "--only", "4,q4"])
    assert "'q4' is no number of rows, 1 to 512, with or without a p before it" in capsys.readouterr().err


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_a_decode_row_lies_in_two_ranges_of_slots() -> None:
    plan = plan_of(Step.of("2", context=9, num_tokens=100), first=100, vocab_size=50)
    assert plan.is_decode and plan.positions.tolist() == [8, 8]
    assert [row.extents for row in plan.rows] == [[(100, 108), (116, 117)], [(108, 116), (117, 118)]]
    assert plan.out_slots.tolist() == [116, 117]


def test_a_prefill_cuts_its_tokens_into_rows() -> None:
    step = Step.of("p3", context=9, num_tokens=100)
    plan = plan_of(step, first=7, vocab_size=50)
    assert step.what == "prefill, 3 x 33" and step.shown(ms=0.5) == "198,000"
    assert plan.num_tokens == 99 and plan.out_slots.tolist() == list(range(7, 106)) and plan.logits_rows.shape == (3,)


class Graph:
    """Stands in for a CUDA graph, and counts its replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def graph_runner(graphs: list[Graph], scale: float = 1.0) -> Any:
    def forward(_: object) -> torch.Tensor:
        for graph in graphs:
            graph.replay()
        return torch.tensor([[3.0, 4.0]])

    return SimpleNamespace(forward=forward, eager=SimpleNamespace(forward=lambda _: scale * torch.tensor([[3.0, 4.0]])))


@pytest.mark.parametrize("count", [1, 2])
def test_the_graphs_that_a_step_went_through_are_replayed(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    used, other = [Graph() for _ in range(count)], Graph()
    run, _, num_graphs = replayed(graph_runner(used), None)
    run()
    assert num_graphs == count and [graph.replays for graph in [*used, other]] == [2] * count + [0]


def test_graphs_are_compared_with_the_step_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    found = measure(graph_runner([Graph()], scale=2.0), None, lambda run: {"ms": 1.0})
    assert found["to_eager"] == 0.5 and found["num_graphs"] == 1 and found["best"] == [1]


def test_logits_that_are_not_finite_give_no_figure() -> None:
    runner = SimpleNamespace(forward=lambda _: torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        measure(runner, None, lambda run: {"ms": 1.0})


# ---- figures --------------------------------------------------------------------------------------------------------


def test_the_table_has_medians_and_how_many_times_as_fast_a_tree_is() -> None:
    def tree(name: str, *ms: float) -> dict[str, Any]:
        figures = [{"16": {"ms": t, "mhz": 1000 + t, "watts": 700.4, "to_eager": 0.01, "num_graphs": 1}} for t in ms]
        return {"name": name, "runs": [{"figures": its, "errors": {}} for its in figures]}

    steps = [Step("16", 16, 575, 1), Step("p1", 1, 0, 8192)]
    trees = [tree("new", 4.0, 5.0, 3.0), tree("old", 5.0, 7.0)]
    trees[1]["runs"][0]["errors"]["p1"] = "OutOfMemoryError: no"
    found = list(rows(steps, trees))
    assert found[0] == ["decode, 16 x 576", "ms", "new", "4.000", "1.500x", "4.000 5.000 3.000", "1,004", "700", ""]
    assert found[1] == ["", "", "old", "6.000", "", "5.000 7.000", "1,006", "700", ""]
    assert found[3] == ["", "", "old", "", "", "", "", "", ""]
    assert "old, p1: OutOfMemoryError: no" in list(notes(steps, trees))


def test_logits_are_compared_with_one_run_and_left_out() -> None:
    first: dict[str, Any] = {"figures": {"1": {"sample": [3.0, 4.0], "best": [7, 8]}}}
    other: dict[str, Any] = {"figures": {"1": {"sample": [3.0, 3.0], "best": [7, 9]}}}
    compare_logits([other, first], first)
    assert other["figures"]["1"] == {"to_baseline": 0.2, "same_best": 0.5}
    assert first["figures"]["1"] == {"to_baseline": 0.0, "same_best": 1.0}


def test_between_two_times_the_card_is_read_and_its_energy_counted() -> None:
    card = Card()
    card.readings = [Reading(at, 1000.0 + at, 100.0 * at, 50.0 * at) for at in (0.0, 1.0, 2.0, 3.0, 4.0)]
    assert card.between(0.5, 3.5) == {"mhz": 1002.0, "watts": 200.0, "joules": 150.0}
    assert card.between(0.5, 2.5) == {}  # two readings


def test_joules_are_those_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("bench.gpu.card.time", SimpleNamespace(perf_counter=lambda: float(now[0])))
    now, card = np.zeros(1), Card()
    card.readings = [Reading(at, 1500.0, 600.0, 600.0 * at) for at in np.arange(0.0, 10.0, 0.02).tolist()]

    def run() -> None:
        now[0] += 0.01

    assert card.steady(run) == pytest.approx({"ms": 10.0, "mhz": 1500.0, "watts": 600.0, "joules": 6.0})
    assert now[0] == pytest.approx(0.03 + 1.2 + 1.0 + 0.08, abs=0.05)  # warm runs, both times, two pieces in the queue


def test_the_library_tells_milliwatts_and_millijoules(monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=650_500))
    library = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVMLError=RuntimeError,
        nvmlDeviceGetFieldValues=lambda handle, fields: [told],
        nvmlDeviceGetPowerUsage=lambda handle: 600_000,
        nvmlDeviceGetClockInfo=lambda handle, clock: 1980,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 12_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", lambda: None)
    read = nvml_reader()
    assert read()[1:] == (1980.0, 650.5, 12.0)
    told.nvmlReturn = 3  # not supported
    assert read().watts == 600.0


def test_a_card_that_cannot_be_read_leaves_the_times() -> None:
    def none() -> Any:
        raise RuntimeError("no driver")

    with Card(none) as card:
        found = card.steady(lambda: None, scale=100)
    assert list(found) == ["ms"]
    assert card.problem == "RuntimeError: no driver"
