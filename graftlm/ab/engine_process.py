"""EngineProcess: one engine in a process of its own, so that engines share no cache, no thread pool and no memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftlm.ab.comparison import Round
from graftlm.ab.meter import Work
from graftlm.ab.other_python import NEEDS, PYTHON, command
from graftlm.core.errors import ConfigError, GraftError


class EngineFailed(GraftError):
    """An engine could not be built or its run failed. `remedy` is a command that may help, or empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.remedy = remedy


class EngineProcess:
    """Starts the process at once; `load` waits until the pipeline file is imported.

    Every process gets the same environment: `threads` compute threads and private, empty framework caches.

    python  the Python that runs it; None: this one
    """

    def __init__(
        self,
        path: Path,
        engine: str,
        model: str,
        threads: int,
        plant: str | None = None,
        python: str | None = None,
        **options: str | None,
    ) -> None:
        self.label = f"{engine}, {plant}" if plant else engine
        self._folder = tempfile.TemporaryDirectory(prefix="graftlm-ab-")
        self._log = (Path(self._folder.name) / "log").open("w+", encoding="utf-8", errors="replace")
        environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment[PYTHON] = sys.executable
        environment.setdefault("PYTHONHASHSEED", "0")  # sets have the same order in every process, and so do prompts
        self.python = python or sys.executable
        environment |= {"DSPY_CACHEDIR": self._folder.name, "TOKENIZERS_PARALLELISM": "true", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command(self.python, "-m", "graftlm.ab.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
        )
        self._loading = {"path": str(path.resolve()), "engine": engine, "model": model, "plant": plant} | options
        self._send("load", self._loading)

    def load(self) -> dict[str, Any]:
        """Wait for the pipeline: its name, title and inputs."""
        description: dict[str, Any] = self._receive()
        return description

    def ask(self, command: str, on_calls: Callable[[int], None] = lambda calls: None, **arguments: Any) -> Any:
        """Run a command of the worker and wait for its value.

        Raises: ConfigError for a mistake in the pipeline file, EngineFailed for any other error.
        """
        self._send(command, arguments)
        return self._receive(on_calls)

    def round(self, on_calls: Callable[[int], None]) -> Round:
        """Run and measure all inputs once."""
        found = self.ask("round", on_calls)
        spans = [(begin, end) for begin, end in found.pop("spans")]
        return Round(**(found | {"work": Work(**found["work"]), "spans": spans}))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the servers that it has started
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # a command was still on its way
                    stream.close()
        self._folder.cleanup()

    def _send(self, command: str, arguments: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: `_receive` says why
            self._process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self._process.stdin.flush()

    def _receive(self, on_calls: Callable[[int], None] = lambda calls: None) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            if "calls" in reply:
                on_calls(reply["calls"])
            elif "config_error" in reply:
                raise ConfigError(reply["config_error"])
            elif "error" in reply:
                raise EngineFailed(reply["error"], reply["remedy"])
            else:
                return reply["value"]
        words = self._last_words()
        missing = "ModuleNotFoundError" in words and self.python != sys.executable
        raise EngineFailed(
            f"the engine's process ended with status {self._process.wait()}: {words}",
            f"{self.python} -m pip install {NEEDS}" if missing else "",
        )

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"
