"""`transformers serve` on a local port: a usual backend of frameworks that call endpoints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(model: str, *options: str, num_threads: int | None = None, timeout_s: float = 120) -> Iterator[str]:
    """Serve a local folder or Hugging Face id while this context is open; gives the base URL.

    options      of the command line
    num_threads  of torch. Its threads wait actively, so that beside other processes one is several times faster.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", model, "--host", "127.0.0.1", *options]
    environment = os.environ if num_threads is None else {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, time.monotonic() + timeout_s)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError("transformers serve ended at once; it needs `pip install transformers[serving]`")
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"transformers serve did not answer at {url}")
