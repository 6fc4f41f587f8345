"""Python processes that import nothing from the folder in which they are started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def start(
    arguments: Sequence[str], *, python: str | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a Python process with `arguments`, for example ("-c", code).

    python   the program; None is this process's own, which then finds the packages of this process
    env      variables instead of those of this process
    options  of subprocess.Popen

    `python -c` and `python -m` import from the working folder first: a file there with the name of a module would run.

    Raises: OSError if no process can be started.
    """
    command, environment = _command(arguments, python, env)
    return subprocess.Popen(command, env=environment, **options)


def run(
    arguments: Sequence[str], *, python: str | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a Python process as `start` starts it, and wait for its end. options: of subprocess.run, which may raise"""
    command, environment = _command(arguments, python, env)
    return subprocess.run(command, env=environment, **options)


def end_with_starter() -> None:
    """End this process once the pipe at its standard input closes, unless `release` was called: its starter was killed.

    A thread watches, so that a long compilation ends as well.
    """

    def watch() -> None:
        if not os.read(0, 1):
            os._exit(1)

    threading.Thread(target=watch, name="graftlm starter", daemon=True).start()


def release(process: subprocess.Popen[Any]) -> None:
    """Let a process that called `end_with_starter` outlive this one."""
    if process.stdin is not None:
        with suppress(OSError, ValueError), process.stdin as pipe:
            pipe.write(b".")


def _command(
    arguments: Sequence[str], python: str | None, env: Mapping[str, str] | None
) -> tuple[list[str], dict[str, str]]:
    own = python is None or python == sys.executable
    environment = {**(os.environ if env is None else env), "PYTHONSAFEPATH": "1"}
    if own:
        environment["PYTHONPATH"] = import_path()
    return [sys.executable, "-P", *arguments] if own else [str(python), *arguments], environment


def import_path() -> str:
    """Return the folders that this process imports from, this package's included, and not its working folder as ""."""
    import graftlm

    folders = [folder for folder in sys.path if folder]
    return os.pathsep.join(dict.fromkeys([*folders, *(str(Path(path).parent) for path in graftlm.__path__)]))
