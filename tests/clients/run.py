"""Install clients, each into a folder of its own, and run the jobs of each against `graftlm serve sprout`.

A folder for each: some of them exclude each other's newest dependencies.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.served import started

PACKAGES = {
    "openai": ("openai==3.57.0",),
    "anthropic": ("anthropic==2.14.0",),
    "ollama": ("ollama==0.6.3",),
    "litellm": ("litellm==1.110.2",),
    "openai-agents": ("openai-agents==0.24.0",),
    "instructor": ("instructor==1.17.0",),
    "pydantic-ai-slim": ("pydantic-ai-slim[openai]==2.68.0",),
    "agent-framework": ("agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"),
    "langchain-openai": (
        "langchain-openai==1.7.4",
        "openinference-instrumentation-langchain==0.1.80",
        "opentelemetry-sdk==1.45.2",
    ),
    "llm": ("llm==0.36",),
    "aider": ("aider-chat==0.86.2",),
    "litellm-proxy": ("litellm[proxy]==1.108.7",),
}
"""The packages of the Python index that each client needs, in the versions whose jobs passed."""
NODE_PACKAGES = {
    "node-openai": ("openai@7.59.0",),
    "node-ai": ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    "node-langchain": ("@langchain/openai@1.6.0", "@langchain/core@1.4.0"),
    "codex": ("@openai/codex@0.171.0",),
    "opencode": ("opencode-ai@1.18.33",),
    "claude": ("@anthropic-ai/claude-code@2.1.197",),
    "promptfoo": ("promptfoo@0.121.20",),
}
"""The npm packages of each client, the client first. Without npm these clients do not run."""
PROGRAMS = ("llm", "aider", "litellm-proxy", "codex", "opencode", "claude", "promptfoo")
"""Clients that are programs: their jobs are in programs.py."""
NEWEST = "--newest"
FOLDER = Path(os.environ.get("CLIENTS_FOLDER", ".scratch/clients")).resolve()
HERE = Path(__file__).parent


def install(name: str, newest: bool) -> Path | None:
    """Return the folder of a client, installed if it is new; None if it cannot be installed.

    newest  install the newest versions in place of the pinned ones
    """
    target = FOLDER / (f"{name}-newest" if newest else name)
    if target.exists():
        return target
    packages = (*NODE_PACKAGES.get(name, ()), *PACKAGES.get(name, ()))
    if newest:
        packages = tuple(re.sub(r"(?<=.)(==|@)[\d.]+$", "", one) for one in packages)
    if name in NODE_PACKAGES:
        target.mkdir(parents=True)
        (target / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages]
    else:
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *packages, "pydantic"]
    if subprocess.run(command, cwd=target if name in NODE_PACKAGES else None).returncode == 0:
        return target
    shutil.rmtree(target, ignore_errors=True)
    print(f"{name}: cannot be installed", flush=True)
    return None


def main(arguments: list[str]) -> int:
    """Return the number of clients that failed. arguments: names of clients, all without any; `--newest`"""
    names = [one for one in arguments if one != NEWEST]
    known = [*PACKAGES, *(NODE_PACKAGES if shutil.which("npm") else ())]
    if unknown := [name for name in names if name not in known]:
        print(f"no client {unknown[0]!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), "sprout", "--option", "dtype=float32") as served,
    ):
        served.wait_ready()
        for name in names or known:
            target = install(name, NEWEST in arguments)
            if target is None or subprocess.run(**_job(name, served.url, target, folder)).returncode:
                failed.append(name)
    print(f"{len(names or known) - len(failed)} clients passed, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return len(failed)


def _job(name: str, url: str, target: Path, folder: str) -> dict[str, Any]:
    """Return the arguments of subprocess.run that run a client's jobs."""
    if name in PROGRAMS:
        return {"args": [sys.executable, str(HERE / "programs.py"), url, name], "cwd": target}
    if name in NODE_PACKAGES:
        client = NODE_PACKAGES[name][0].rpartition("@")[0]
        return {"args": ["node", str(HERE / "jobs.mjs"), url, client], "cwd": target}
    env = {**os.environ, "PYTHONPATH": str(target)}
    return {"args": [sys.executable, str(HERE / "jobs.py"), url, name], "cwd": folder, "env": env}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
