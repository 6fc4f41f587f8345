"""EngineProcess: one engine in a process of its own, so that engines share no cache, no thread pool and no memory."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftlm.ab.engines.other_python import NEEDS, PYTHON, command
from graftlm.ab.engines.servers import last_words
from graftlm.core.errors import ConfigError, GraftError
from graftlm.kernels.jit import python_process


class EngineFailed(GraftError):
    """An engine could not be built or its run failed. `remedy` is a command that may help, or empty."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.remedy = remedy


class EngineProcess:
    """A handle of an engine's process, which starts at once. The first `receive` returns the pipeline's description.

    Every process gets the same environment: `threads` compute threads and private, empty framework caches.

    python   the Python that runs it; None: this one
    options  `framework`, `swap` and `dtype` of the worker
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
        self.python = python or sys.executable
        self._folder = tempfile.TemporaryDirectory(prefix="graftlm-ab-")
        self._log = (Path(self._folder.name) / "log").open("w+", encoding="utf-8", errors="replace")
        environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment |= {"DSPY_CACHEDIR": self._folder.name, "TOKENIZERS_PARALLELISM": "true", "PYTHONUNBUFFERED": "1"}
        environment[PYTHON] = sys.executable
        environment.setdefault("PYTHONHASHSEED", "0")  # sets have the same order everywhere
        program, *arguments = command(self.python, "-m", "graftlm.ab.measure.worker")
        self._process = python_process.start(
            arguments,
            python=program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
        )
        self.send("load", {"path": path.resolve(), "engine": engine, "model": model, "plant": plant} | options)

    def ask(self, command: str, on_calls: Callable[[int], None] = lambda calls: None, **arguments: Any) -> Any:
        """Run a command of the worker and return its value. Raises: as `receive`."""
        self.send(command, arguments)
        return self.receive(on_calls)

    def receive(self, on_calls: Callable[[int], None] = lambda calls: None) -> Any:
        """Wait for a reply. Raises: ConfigError for a mistake in the pipeline file, EngineFailed for other errors."""
        assert self._process.stdout is not None
        with suppress(EOFError, pickle.UnpicklingError):  # the process has ended, perhaps within a reply
            while True:
                kind, value = pickle.load(self._process.stdout)
                if kind == "calls":
                    on_calls(value)
                elif kind == "config_error":
                    raise ConfigError(value)
                elif kind == "error":
                    raise EngineFailed(*value)
                else:
                    return value
        words = last_words(self._log)
        missing = "ModuleNotFoundError" in words and self.python != sys.executable
        raise EngineFailed(
            f"the engine's process ended with status {self._process.wait()}: {words}",
            f"{self.python} -m pip install {NEEDS}" if missing else "",
        )

    def close(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the servers that it has started
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # a command was not read
                    stream.close()
        self._folder.cleanup()

    def send(self, command: str, arguments: dict[str, Any]) -> None:
        """Send a command of the worker; `receive` returns its value."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended: `receive` says why
            self._process.stdin.write(pickle.dumps((command, arguments)))
            self._process.stdin.flush()
