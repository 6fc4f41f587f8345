"""A real `graftlm serve` process for tests: started, asked and stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

READY_S = 300.0


@dataclass
class Served:
    """A server process. `log` is where its standard error goes."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Where it listens; waits until it does."""
        for _ in self._until("listens"):
            if found := re.search(r"at (https?://\S+)/v1", self.log.read_text()):
                return found.group(1)
        raise AssertionError

    def get(self, path: str) -> tuple[int, str]:
        """The status and body of GET `path`."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:  # it holds the connection
                return error.code, error.read().decode()

    def wait_ready(self) -> None:
        for _ in self._until("is ready"):
            with suppress(urllib.error.URLError):  # one that cannot load closes its port first, and says why at its end
                if self.get("/health")[0] == 200:
                    return

    def end(self, sig: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout_s)

    def _until(self, what: str) -> Iterator[None]:
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {self.log.read_text()[-2000:]}")
            yield
            time.sleep(0.05)
        raise TimeoutError(f"no server that {what} after {READY_S} s: {self.log.read_text()[-2000:]}")


@contextmanager
def started(folder: Path, *arguments: str, path: Path | None = None, **variables: str) -> Iterator[Served]:
    """Run `graftlm serve` with `arguments`; it is killed at the end if it still runs.

    path       a folder that the process looks for modules in
    variables  of its environment
    """
    log = folder / "server.log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "graftlm", "serve", "--port", "0", *arguments]
        if path is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, sys.path)])
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | variables)
    try:
        yield Served(process, log)
    finally:
        process.kill()
        process.wait()
