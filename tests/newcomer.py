"""python tests/newcomer.py [--reuse]: the first hour of a newcomer, in a fresh virtual environment.

The wheel is built from the source distribution and installed with the frameworks. Then everything that the readme
prints is run in an empty folder, with an empty cache. Every step must succeed, give right answers and print no warning.
Times are shown as ratios to `python -c "import torch, transformers"` in the same environment.

--reuse takes the dependencies, but not GraftLM, from the environment that runs this script, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIPELINE = """
import sys
from pathlib import Path
import graftlm
from graftlm.ab.pipeline import Pipeline
from graftlm.ab.measure.worker import local_name

assert "site-packages" in graftlm.__file__, graftlm.__file__
pipeline = Pipeline.load(Path(graftlm.__file__).parent / "demo/pipelines" / f"{sys.argv[1]}.py")
llm = pipeline.engine("graftlm").open(local_name("sprout"))
answers = pipeline.answer(llm, pipeline.inputs)
wrong = [item for item, answer in zip(pipeline.inputs, answers) if not pipeline.right(item, answer)]
assert not wrong, wrong
print(f"{len(answers)} of {len(answers)} right")
"""


class Newcomer:
    """Runs commands as somebody who has just installed the package, and keeps what they took and said."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._python = python
        self._folder = folder
        self._unit_s = 0.0
        self.num_failed = 0

    def step(self, name: str, *arguments: str, expected: str = "") -> None:
        """Run Python with `arguments`; it has to succeed without a warning and print `expected`."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GRAFTLM"))}
        environment |= {"PYTHONWARNINGS": "default", "COLUMNS": "160", "XDG_CACHE_HOME": str(self._folder / "cache")}
        started = time.perf_counter()
        command = [str(self._python), *arguments]
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        self._unit_s = self._unit_s or seconds
        warned = [line for line in done.stderr.splitlines() if "warn" in line.lower()]
        ok = done.returncode == 0 and not warned and expected in done.stdout + done.stderr
        self.num_failed += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name:44} {seconds:6.1f} s {seconds / self._unit_s:5.1f}x", flush=True)
        if not ok:
            print("\n".join([f"  exit status {done.returncode}", *done.stdout.splitlines()[-5:], *warned]))
            print("\n".join(done.stderr.splitlines()[-15:]), flush=True)


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, *, reuse: bool) -> Path:
    """A new environment with the wheel; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    quiet = ["-qq", "--disable-pip-version-check"]
    if reuse:
        subprocess.run([python, "-m", "pip", "install", *quiet, "--no-deps", wheel], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "reused.pth").write_text(sysconfig.get_path("purelib") + "\n")
    else:
        subprocess.run([python, "-m", "pip", "install", *quiet, f"{wheel}[bench]"], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--reuse", action="store_true", help="take the dependencies from this environment")
    reuse = parser.parse_args().reuse
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        python = install(build_wheel(home / "dist"), home / "venv", reuse=reuse)
        (home / "empty").mkdir()
        newcomer = Newcomer(python, home / "empty")
        snippets = home / "readme.py"
        snippets.write_text("\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)))
        pipeline = home / "pipeline.py"
        pipeline.write_text(PIPELINE)
        newcomer.step("import torch, transformers", "-c", "import torch, transformers")
        newcomer.step("graftlm --version", "-m", "graftlm", "--version", expected="graftlm ")
        newcomer.step("the readme's Python, first process", str(snippets))
        newcomer.step("the readme's Python, second process", str(snippets))
        question = ("Mara is a baker. Mara works as a", "--max-tokens", "4")
        newcomer.step("graftlm generate", "-m", "graftlm", "generate", *question, expected="baker")
        for framework in ("langchain", "dspy", "llama_index", "guidance"):
            newcomer.step(f"a pipeline of {framework}", str(pipeline), framework, expected="right")
        (site,) = (home / "venv").glob("lib/python*/site-packages")
        stock = str(site / "graftlm/demo/pipelines/langchain.py")
        options = ("--minutes", "0.1", "--report", "out")
        newcomer.step("graftlm ab --report", "-m", "graftlm", "ab", stock, *options, expected="wrote out/report.html")
    raise SystemExit(int(newcomer.num_failed > 0))


if __name__ == "__main__":
    main()
