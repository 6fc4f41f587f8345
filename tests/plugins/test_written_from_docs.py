"""A plugin of each kind, written from docs/plugins.md alone, installed as users do and used in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plugins.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the page's plugin in it, and the page's script beside them."""
    project = tmp_path_factory.mktemp("acme")
    (manifest,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    files = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for name, text in [("pyproject.toml", manifest), *files]:
        path = project / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    site = project / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--disable-pip-version-check", "--target", site, project], check=True)
    (site / "use.py").write_text((project / "use.py").read_text())
    return site


def run(site: Path, *command: str) -> str:
    """What a Python process prints that finds the plugin beside GraftLM."""
    paths = os.pathsep.join([str(site), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_kind_is_offered(site: Path) -> None:
    listed = run(site, "-m", "graftlm", "plugins")
    for name in ("acme-echo", "acme-choices", "acme-plain", "acme-random"):
        assert name in listed


def test_every_kind_works_and_the_observer_hears_of_each_request(site: Path) -> None:
    printed = run(site, "use.py").splitlines()
    assert len(printed) == 9
    assert all(re.fullmatch(r"request \d+: \d+ of \d+ tokens were cached", line) for line in printed)
