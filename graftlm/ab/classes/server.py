"""Server: an engine that frameworks reach through their own OpenAI client; started here, or running before."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from graftlm.ab.classes.resettable_server import RESET
from graftlm.ab.other_python import command, home_of
from graftlm.core.errors import EngineError

READY_S = 900.0
"""A server must answer after so many seconds: large models are read and compiled before."""
RUNNING_S = 10.0
"""So many seconds are enough for one that was there before."""


@dataclass(frozen=True)
class Kind:
    """How one engine's server is started.

    packages  the modules that must be installed; the last is the one that is missing first
    command  what follows the Python interpreter, of model and port
    path     is asked until it answers
    reset    empties the prefix cache by a POST; "" where the server has no such request
    lists    whether /v1/models lists every name by which its model can be asked
    """

    packages: tuple[str, ...]
    command: Callable[[str, int], list[str]]
    path: str = "/v1/models"
    reset: str = ""
    lists: bool = False


_RESETTABLE = ("-m", "graftlm.ab.classes.resettable_server")

KINDS: Mapping[str, Kind] = {
    "hf-batching": Kind(
        ("transformers", "fastapi"),
        lambda model, port: [
            *_RESETTABLE, "transformers", model, "--continuous-batching", "--port", str(port)
        ],
        "/health",
        RESET,
    ),
    "vllm": Kind(
        ("vllm",),
        lambda model, port: ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)],
        "/health",
        "/reset_prefix_cache",
        lists=True,
    ),
    "sglang": Kind(
        ("sglang",),
        lambda model, port: ["-m", "sglang.launch_server", "--model-path", model, "--port", str(port)],
        "/health",
        "/flush_cache",
        lists=True,
    ),
    "llama-cpp": Kind(
        ("llama_cpp",),
        lambda model, port: [
            *_RESETTABLE, "llama_cpp", "--model", gguf(model), "--n_ctx", "0", "--port", str(port)
        ],
        reset=RESET,
    ),
}  # fmt: skip


def gguf(model: str) -> str:
    """The GGUF file that llama.cpp reads: `model` itself, or the one file of that kind in the folder.

    Raises: EngineError that names how to convert a folder.
    """
    path = Path(model).expanduser()
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1 and found[0].is_file():
        return str(found[0])
    raise EngineError(
        f"llama.cpp reads GGUF files and {str(model)!r} holds {len(found)} of them; convert it with llama.cpp's "
        "convert_hf_to_gguf.py into that folder, or give the file: --engines llama-cpp:model.gguf"
    )


class Server:
    """A server of one of the `KINDS`. One that was started here ends with this process, or with `close`.

    where  a model, for which a server is started on a free port; or the URL of a running one, which goes on after
           `close`. Its processor time and memory are known where it listens on this machine.

    Raises: ModuleNotFoundError for a server that is not installed; EngineError for one that does not answer.
    """

    open: list[Server] = []
    """The servers of this process."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self._kind = name, KINDS[name]
        self.pid: int | None = None
        """The server's process; None where it cannot be told."""
        self._process: subprocess.Popen[bytes] | None = None
        if is_url(where):
            self._root = where.rstrip("/").removesuffix("/v1")
            self.pid = listener(self._root)
        else:
            self._start(where)
        Server.open.append(self)
        self._await_ready()

    def _start(self, model: str) -> None:
        python = home_of(self._kind.packages)
        if python is None:
            missing = self._kind.packages[-1]
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._root = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the server runs)
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # which has the request that empties the cache
        self._process = subprocess.Popen(
            command(python, *self._kind.command(model, port), "--host", "127.0.0.1"),
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment,
        )  # fmt: skip
        self.pid = self._process.pid

    @property
    def lists(self) -> bool:
        return self._kind.lists

    @property
    def url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self._root}/v1"

    def reset(self) -> bool:
        """Empty the prefix cache; False if the server cannot."""
        if not self._kind.reset:
            return False
        request = urllib.request.Request(self._root + self._kind.reset, b"", method="POST")
        with suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status < 300)
        return False

    @property
    def end(self) -> str:
        """How the server ended, with its last words; empty while it runs, and for one that was not started here."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return ""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        memory = " (SIGKILL: perhaps for want of memory)" if status == -9 else ""
        return f"the server of {self.name} ended with {how}{memory}: {self._last_words()}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._log.close()
        Server.open.remove(self)

    def _await_ready(self) -> None:
        limit_s = RUNNING_S if self._process is None else READY_S
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if end := self.end:
                self.close()
                raise EngineError(end)
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(self._root + self._kind.path) as done:
                if done.status == 200:
                    return
            time.sleep(0.2)
        self.close()
        asked = self._root + self._kind.path
        raise EngineError(f"the server of {self.name} did not answer {asked} within {limit_s:.0f} s")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"


def is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def listener(url: str) -> int | None:
    """The process of this machine that listens at a URL's port; None if there is none, or none that we may see."""
    import psutil

    address = urlsplit(url)
    if address.hostname not in {"localhost", "127.0.0.1", "::1"}:
        return None
    port = address.port or (443 if address.scheme == "https" else 80)
    with suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port:
                return found.pid
    return None
