"""Install the newest clients, each into a folder of its own, and run jobs.py with each against `graftlm serve sprout`.

A folder for each: some of them exclude each other's newest dependencies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.served import started

PACKAGES = ("openai", "anthropic", "ollama", "litellm")
FOLDER = Path(os.environ.get("CLIENTS_FOLDER", ".scratch/clients")).resolve()


def main(names: list[str]) -> int:
    """Return the number of clients that failed. names: those to run; all without any"""
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), "sprout", "--option", "dtype=float32") as served,
    ):
        served.wait_ready()
        for name in names or PACKAGES:
            target = FOLDER / name
            if not target.exists():
                command = [sys.executable, "-m", "pip", "install", "-q", "--target", target, name, "pydantic"]
                if subprocess.run(command).returncode:
                    print(f"{name}: cannot be installed", flush=True)
                    failed += 1
                    continue
            clean = {**os.environ, "PYTHONPATH": str(target)}
            jobs = [sys.executable, Path(__file__).with_name("jobs.py"), served.url, name]
            failed += subprocess.run(jobs, env=clean, cwd=folder).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
