"""Install the newest clients, each into a folder of its own, and run jobs.py with each against `graftlm serve sprout`.

A folder for each: some of them exclude each other's newest dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.served import started

PACKAGES = {name: (name,) for name in ("openai", "anthropic", "ollama", "litellm", "openai-agents", "instructor")} | {
    "pydantic-ai-slim": ("pydantic-ai-slim[openai]",)
}
"""The packages of the Python index that each client needs."""
NODE_PACKAGES = {
    "node-openai": ("openai",),
    "node-ai": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
    "node-langchain": ("@langchain/openai", "@langchain/core"),
}
"""The npm packages of each client, the client first. Without npm these clients do not run."""
FOLDER = Path(os.environ.get("CLIENTS_FOLDER", ".scratch/clients")).resolve()
HERE = Path(__file__).parent


def install(name: str) -> Path | None:
    """Return the folder of a client, installed if it is new; None if it cannot be installed."""
    target = FOLDER / name
    if target.exists():
        return target
    if name in NODE_PACKAGES:
        target.mkdir(parents=True)
        (target / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *NODE_PACKAGES[name]]
    else:
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *PACKAGES[name], "pydantic"]
    if subprocess.run(command, cwd=target if name in NODE_PACKAGES else None).returncode == 0:
        return target
    shutil.rmtree(target, ignore_errors=True)
    print(f"{name}: cannot be installed", flush=True)
    return None


def main(names: list[str]) -> int:
    """Return the number of clients that failed. names: those to run; all without any"""
    known = [*PACKAGES, *(NODE_PACKAGES if shutil.which("npm") else ())]
    failed = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), "sprout", "--option", "dtype=float32") as served,
    ):
        served.wait_ready()
        for name in names or known:
            target = install(name)
            if target is None:
                failed += 1
                continue
            if name in NODE_PACKAGES:
                jobs = ["node", str(HERE / "jobs.mjs"), served.url, NODE_PACKAGES[name][0]]
                failed += subprocess.run(jobs, cwd=target).returncode != 0
            else:
                jobs = [sys.executable, str(HERE / "jobs.py"), served.url, name]
                failed += (
                    subprocess.run(jobs, env={**os.environ, "PYTHONPATH": str(target)}, cwd=folder).returncode != 0
                )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
