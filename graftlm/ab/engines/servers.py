"""Server: an OpenAI-compatible server that a framework's client sends requests to; started here, or running before.

As a command it runs the server of transformers or llama-cpp-python with one more request, which empties the prefix
cache: python -m graftlm.ab.engines.servers transformers MODEL --continuous-batching --port 8000
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from graftlm.ab.engines.other_python import command, home_of
from graftlm.core.errors import EngineError
from graftlm.kernels.jit import python_process

READY_S = 900.0
"""Seconds that a server may take to start: large models are read and compiled first."""
HEALTH, RESETS = "/health", ("/reset_prefix_cache", "/flush_cache")
"""Paths: a GET that succeeds once a server is ready; POSTs that empty a prefix cache (vLLM, SGLang)."""
NUM_BLOCKS, BATCH_TOKENS = 256, 2048
"""KV blocks and tokens per forward pass of continuous batching on a CPU, where it would take all free memory."""
_SELF = ("-m", "graftlm.ab.engines.servers")

SERVERS: Mapping[str, tuple[tuple[str, ...], Callable[[str], list[str]]]] = {
    "hf-batching": (
        ("transformers", "fastapi"), lambda model: [*_SELF, "transformers", model, "--continuous-batching"]
    ),
    "vllm": (("vllm",), lambda model: ["-m", "vllm.entrypoints.openai.api_server", "--model", model]),
    "sglang": (("sglang",), lambda model: ["-m", "sglang.launch_server", "--model-path", model]),
    "llama-cpp": (("llama_cpp",), lambda model: [*_SELF, "llama_cpp", "--model", gguf(model), "--n_ctx", "0"]),
}  # fmt: skip
"""By name: the modules that a server needs, the one that is missing first last; and Python's arguments by model."""


def gguf(model: str) -> str:
    """Return the GGUF file that llama.cpp reads: `model` itself, or the one file of that kind in the folder.

    Raises: EngineError that names how to convert a folder.
    """
    path = Path(model).expanduser()
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(found) == 1 and found[0].is_file():
        return str(found[0])
    raise EngineError(
        f"llama.cpp reads GGUF files and {str(model)!r} holds {len(found)} of them; convert it with llama.cpp's "
        "convert_hf_to_gguf.py into that folder, or give the file: --engines llama-cpp:model.gguf"
    )


class Server:
    """An OpenAI-compatible server. A started one ends with this process, or with `close`.

    url  the base URL for OpenAI clients
    pid  the server's process, whose processor time and memory are counted; None where it is unknown
    """

    open: list[Server] = []
    """The servers of this process."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes] | None = None, log: Any = None) -> None:
        self.name, self.url, self._process, self._log = name, url.rstrip("/"), process, log
        self.pid = listener(url) if process is None else process.pid
        self._resets: tuple[str, ...] = RESETS
        Server.open.append(self)

    @classmethod
    def at(cls, url: str) -> Server:
        """Use a running server. Its cache is emptied if the server has a request for it."""
        return cls(f"openai:{url}", url)

    @classmethod
    def start(cls, name: str, model: str) -> Server:
        """Start a server for a model on a free port, and wait until it is ready.

        Raises: ModuleNotFoundError for a server that is not installed; EngineError for one that ends or hangs.
        """
        packages, arguments = SERVERS[name]
        python = home_of(packages)
        if python is None:
            raise ModuleNotFoundError(f"No module named {packages[-1]!r}", name=packages[-1])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the server runs)
        program, *rest = command(python, *arguments(model), "--port", str(port), "--host", "127.0.0.1")
        process = python_process.start(
            rest, python=program,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},  # which has the request that empties the cache
        )  # fmt: skip
        server = cls(name, f"http://127.0.0.1:{port}/v1", process, log)
        server._await_ready()
        return server

    @property
    def _root(self) -> str:
        return self.url.removesuffix("/v1")

    def reset(self) -> bool:
        """Empty the prefix cache; False if the server has no request for that."""
        for path in self._resets:
            if _succeeds(urllib.request.Request(self._root + path, b"", method="POST"), timeout_s=60):
                self._resets = (path,)
                return True
        self._resets = ()
        return False

    @property
    def end(self) -> str:
        """The exit status of a started server, with the last line of its log; empty while it runs."""
        status = None if self._process is None else self._process.poll()
        if status is None:
            return ""
        how = f"signal {-status}" if status < 0 else f"status {status}"
        memory = " (SIGKILL: perhaps for want of memory)" if status == -9 else ""
        return f"the server of {self.name} ended with {how}{memory}: {last_words(self._log)}"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._log.close()
        Server.open.remove(self)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if end := self.end:
                self.close()
                raise EngineError(end)
            if _succeeds(urllib.request.Request(self._root + HEALTH), timeout_s=max(deadline - time.monotonic(), 0.1)):
                return
            time.sleep(0.2)
        self.close()
        raise EngineError(f"the server of {self.name} did not answer {self._root}{HEALTH} within {READY_S:.0f} s")


def _succeeds(request: urllib.request.Request, timeout_s: float) -> bool:
    """Return True if a server answers a request within `timeout_s` seconds and with success."""
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bool(answer.status < 300)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it holds the connection
        return False


def last_words(log: Any) -> str:
    """Return the last line of a process's log."""
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"


def listener(url: str) -> int | None:
    """Return the process of this machine that listens at a URL's port; None if there is none, or it is hidden."""
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


# -- the servers of transformers and llama-cpp-python, with a request that empties their cache ------------------

_APPS = {
    "transformers": ("transformers.cli.serving.server", "build_server", "transformers.cli.transformers", ["serve"]),
    "llama_cpp": ("llama_cpp.server.app", "create_app", "llama_cpp.server.__main__", []),
}
"""The function that builds a server's FastAPI application, and its command line with the first arguments."""


def main(arguments: Sequence[str]) -> None:
    """Run a server's own command line, with HEALTH and a request that empties the cache."""
    from graftlm.ab.measure.prefix_caches import forget

    name, *rest = arguments
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    module, function, entry, first = _APPS[name]
    server = importlib.import_module(module)
    build = getattr(server, function)

    def built(*args: Any, **options: Any) -> Any:
        app = build(*args, **options)
        app.post(RESETS[0])(lambda: {"caches": forget()})
        app.get(HEALTH)(lambda: {"status": "ok"})
        return app

    setattr(server, function, built)
    sys.argv[1:] = [*first, *rest, *(_cpu_sizes() if name == "transformers" else [])]
    importlib.import_module(entry).main()


def end_with(parent: int) -> None:
    """End this process as soon as process `parent` is no longer its parent, also where that one is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _cpu_sizes() -> list[str]:
    """Return the arguments that limit continuous batching on a CPU."""
    import torch

    if torch.cuda.is_available():
        return []
    return ["--cb-num-blocks", str(NUM_BLOCKS), "--cb-max-batch-tokens", str(BATCH_TOKENS)]


if __name__ == "__main__":
    main(sys.argv[1:])
