from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEST = """
from graftlm.ab import assert_faster, assert_same_answers

def test_answers(ab):
    comparison = ab("shout.py", engines=("low", "lower"), rounds=2, minutes=0.01)
    assert ab("shout.py", engines=("low", "lower"), rounds=2, minutes=0.01) is comparison
    assert_same_answers(comparison)

def test_speed(ab):
    assert_faster(ab("shout.py", engines=("low", "lower"), rounds=2, minutes=0.01), by=1000)
"""


def test_a_users_tests_hold_a_pipeline_to_its_ratio(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(
        "def low(model): return str.lower\n"
        "def lower(model): return str.lower\n"
        "def run(llm, inputs): return [llm(text) for text in inputs]\n"
        "def inputs(): return ['a', 'B']\n"
    )
    (tmp_path / "test_shout.py").write_text(TEST)
    # Loaded by name, once, whether or not the environment has the entry point.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:graftlm", "-p", "graftlm.pytest_plugin", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the interval must lie above 1000.00x" in done.stdout
