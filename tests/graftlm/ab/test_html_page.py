"""The page in a real browser, where one is installed: what a reader finds on it."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from graftlm.ab import Comparison, EngineResult, Round, report
from graftlm.ab.against import changes
from graftlm.ab.html_page import summary
from graftlm.ab.measure.profile import Call, Divergence, Profile, Work

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ANSWERS = {"hf": ["Paris", "Madrid <b>", "31"], "graftlm": ["Paris", "Lisbon", "31"]}


def measured(engine: str, walls: list[float]) -> EngineResult:
    work = Work(calls=3, prompt_tokens=300, computed_tokens=120, completion_tokens=9, largest_batch=3)
    rounds = [Round(wall, ANSWERS[engine], [True, False, True], work, [(0.0, wall)], 2**28) for wall in walls]
    calls = [Call(0.0, 0.4, 0.1, 3, 100), Call(0.1, 0.5, 0.2, 3, 100)]
    phases = {"prefill": 0.3, "decode": 0.1, "framework, between calls": 0.1}
    return EngineResult(engine, rounds, profile=Profile(0.5, calls, phases, 100))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything on it: a difference that is explained, a failure, an earlier report."""
    ours = measured("graftlm", [1.0, 1.02, 0.98])
    ours.divergences = [Divergence(1, 0, 2, "The city is", (" Madrid", " Lisbon"), {"hf": (-0.7, -0.7001)})]
    results = [measured("hf", [2.0, 2.1, 2.0]), ours, EngineResult("vllm", error="no such package")]
    compared = Comparison("city", "Which city?", "sprout", ["France", "Spain", "Age"], results)
    folder = tmp_path_factory.mktemp("report")
    changed = changes(report.to_json([compared]), report.to_json([compared]))
    report.write([compared], folder, "graftlm ab city.py --engines hf,graftlm,vllm", False, changed)
    return folder / "report.html"


@pytest.fixture(scope="module")
def shown(page: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The document as the browser built it, its tags taken out."""
    return _browsed(page, tmp_path_factory.mktemp("browser"))


def _browsed(page: Path, profile: Path, *options: str) -> str:
    """What a browser shows of a page."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *options)
    found = subprocess.run(
        [BROWSER, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return re.sub(r"<[^>]+>", " ", found.stdout.partition("</style>")[2])


@pytest.mark.parametrize(
    "text",
    [
        "graftlm is 2.0 times as fast as hf",
        "gives 2 of 3 equal answers; vllm has no result.",
        "vllm failed.",
        "graftlm answers 1 of 3 inputs differently.",
        "2 of hf and graftlm",
        "city: Which city?",
        "0.5 s",
        "Speed-up over hf",
        "What the time was spent on",
        "Model calls over time",
        "city: where graftlm answers differently",
        "Madrid &lt;b&gt;",
        "call 1, token 3: ' Madrid' became ' Lisbon' after 'The city is'; log-probabilities hf: -0.7000 and -0.7001",
        "vllm failed: no such package",
        "Times, tokens and memory",
        "Beside the earlier report",
        "no change",
        "graftlm ab city.py --engines hf,graftlm,vllm",
    ],
)
def test_the_browser_shows(shown: str, text: str) -> None:
    assert text in " ".join(shown.split())


def test_no_name_is_wider_than_a_phone(tmp_path: Path) -> None:
    """The address of an endpoint stood out of the heading, and the end of it could not be read."""
    hf, ours = measured("hf", [2.0, 2.1, 2.0]), measured("graftlm", [1.0, 1.0, 1.0])
    ours.engine = "openai:http://" + "a" * 80
    compared = Comparison("city", "Which city?", "sprout", ["France", "Spain", "Age"], [hf, ours])
    report.write([compared], tmp_path, "graftlm ab city.py", False)
    page = tmp_path / "report.html"
    measure = "<script>document.body.textContent = `${document.documentElement.scrollWidth} of ${innerWidth}`</script>"
    page.write_text(page.read_text() + measure)
    width, _, room = _browsed(page, tmp_path, "--window-size=500,900").partition(" of ")
    assert int(width) <= int(room.strip())


def test_a_figure_on_the_page_is_the_one_in_the_sheet(page: Path) -> None:
    with (page.parent / "report.csv").open(newline="") as file:
        _, ours, _ = csv.DictReader(file)
    assert (ours["time_to_first_token_s"], ours["best_hit_rate"]) == ("0.1", "0.5")
    assert "0.100 s" in page.read_text() and "50%" in page.read_text()
    assert (ours["prefill (s)"], ours["peak_bytes"]) == ("0.3", str(2**28))


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text and "src=" not in text and "href=" not in text and "url(" not in text


def test_an_engine_whose_baseline_failed_is_not_said_to_have_no_result() -> None:
    answered = EngineResult("graftlm", [Round(1.0, ["a"], None, Work())])
    compared = Comparison("city", "Which city?", "sprout", ["one"], [EngineResult("hf", error="no memory"), answered])
    assert summary(compared) == "graftlm has nothing beside it: hf failed."
