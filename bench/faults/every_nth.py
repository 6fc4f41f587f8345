"""Faults at every n-th call of the system, one alone: memory, files, threads, processes. The laws hold after each.

Each run opens a runtime over a tiny model with cold caches of its own, steps, compiles constraints and answers over
HTTP, while one call fails. The run ends in time, with an answer or with an error; the same requests then get the
right answers, from the same runtime if it was opened, and no slot is lost.
"""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from starlette.testclient import TestClient

import graftlm as gl
from bench.harness import Options, Row
from graftlm.adapters.server.app import Server
from graftlm.core.grammar.cache import _shared as grammars
from tests.faults import failing
from tests.gguf_files import coded
from tests.models import byte_tokenizer, tiny_model

PATIENCE_S = 120.0
FEWEST = 6  # faults of each kind in a quick run
PROMPT = "the sea is wide and the sky is far, " * 4


class NoSpace(OSError):
    """A full disk."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOSPC, text)


class Unreadable(OSError):
    """A failing disk."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EIO, text)


class NoMapping(OSError):
    """A limit of memory."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOMEM, text)


class NoThread(RuntimeError):
    """A limit of threads."""


Seam = tuple[Any, str, type[BaseException]]
"""An object, the name of its call, and what it raises."""
Seams = dict[str, Seam]

SEAMS: Seams = {
    "allocation of a tensor": (torch, "empty", MemoryError),
    "allocation of zeros": (torch, "zeros", MemoryError),
    "allocation of an array": (np, "empty", MemoryError),
    "start of a thread": (threading.Thread, "start", NoThread),
}
FILES: Seams = {
    "a temporary file": (tempfile, "NamedTemporaryFile", NoSpace),
    "writing an archive": (np, "savez", NoSpace),
    "reading bytes": (Path, "read_bytes", Unreadable),
    "reading a text": (Path, "read_text", Unreadable),
    "opening a file": (builtins, "open", Unreadable),
    "opening a file by number": (os, "open", Unreadable),
    "listing a folder": (os, "scandir", Unreadable),
    "renaming a file": (os, "replace", NoSpace),
    "making a folder": (os, "mkdir", NoSpace),
    "start of a process": (subprocess.Popen, "__init__", BlockingIOError),
    "start of a thread during a load": (threading.Thread, "start", NoThread),
}
"""Calls of a model that is loaded by name, with an empty cache folder: weights, tokenizer, caches, compiled loops."""
KEPT: Seams = {
    "reading pieces of a file": (os, "preadv", Unreadable),
    "a file's size": (os, "fstat", Unreadable),
    "listing a folder of KV": (os, "scandir", Unreadable),
    "mapping a file or memory": (mmap, "mmap", NoMapping),
    "reading kept bytes": (Path, "read_bytes", Unreadable),
}
"""Calls of a GGUF model in a second process: packed weights, caches and KV that the first one kept."""


def run(options: Options) -> Iterator[Row]:
    yield from _runs(tiny_model(), SEAMS, options)
    yield from _runs("sprout", FILES, options)
    with TemporaryDirectory() as folder:
        model, kept = coded(Path(folder, "model.gguf")), Path(folder, "kept")
        with mock.patch.dict(os.environ, GRAFTLM_CACHE_DIR=str(kept)), _opened(model) as runtime:
            answers(runtime)
        yield from _runs(model, KEPT, options, kept)


def _runs(model: Any, seams: Seams, options: Options, kept: Path | None = None) -> Iterator[Row]:
    with _folder(kept), _opened(model) as runtime:
        right = answers(runtime)
    for name, (owner, attribute, kind) in seams.items():
        ended: Counter[str] = Counter()
        num = options.count or options.choose(FEWEST, 40)
        for number in _spread(num, options.choose(48, 400)):
            if not _one(model, right, (owner, attribute, kind), number, ended, kept):
                break  # fewer calls than this
        yield Row("every_nth", f"{name}: runs with a fault", ended.total() - ended["no fault"], "runs")
        for law in ("hung", "wrong"):
            yield Row("every_nth", f"{name}: {law}", ended[law], "runs", floor=0, at_most=True)


def _spread(num: int, most: int) -> list[int]:
    """Return `num` numbers of calls: the first ones, then further apart."""
    return sorted({max(i, round(most ** (i / num))) for i in range(1, num + 1)})


def _opened(model: Any) -> gl.Runtime:
    grammars.clear()
    tokenizer = None if isinstance(model, str) else byte_tokenizer()
    if isinstance(model, Path):  # in bfloat16, quantised weights run from their codes
        folder = Path(os.environ["GRAFTLM_CACHE_DIR"], "kv")
        cache, dtype = gl.CacheConfig(max_tokens=2048, host_bytes=1 << 20, folder=folder), "bfloat16"
        return gl.Runtime(str(model), tokenizer=tokenizer, cache=cache, dtype=dtype, device="cpu")
    return gl.Runtime(model, tokenizer=tokenizer, cache=gl.CacheConfig(max_tokens=2048), dtype="float32")


@contextmanager
def _folder(kept: Path | None) -> Iterator[None]:
    """Let a run have a cache folder: `kept`, whose files stay for the next run, or an empty one of its own."""
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, GRAFTLM_CACHE_DIR=str(kept or folder)),
    ):
        yield


def answers(runtime: gl.Runtime) -> list[Any]:
    """Return the answers of greedy requests: plain, constrained, streamed, over HTTP."""
    greedy: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    found: list[Any] = [runtime.generate(PROMPT, **greedy).text]
    found.append(runtime.generate(PROMPT, **greedy, regex="[a-f]{4}").text)
    found.append("".join(chunk.text for chunk in runtime.stream(PROMPT, **greedy)))
    with TestClient(Server(runtime), base_url="http://127.0.0.1") as client:
        body = {"model": runtime.model_name, "prompt": PROMPT, **greedy}
        answer = client.post("/v1/completions", json=body)
        found.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code)
    return found


def _one(model: Any, right: list[Any], seam: Seam, number: int, ended: Counter[str], kept: Path | None) -> bool:
    """Make one run, in a thread, and count its end. Return True if the fault was met."""
    outcome: list[str] = []
    met: list[int] = []

    def go() -> None:
        runtime = None
        with failing(*seam[:2], every=number, once=True, kind=seam[2]) as failed, suppress(Exception):
            runtime = _opened(model)
            answers(runtime)
        met.extend(failed)
        outcome.append(_after(runtime, model, right))

    thread = threading.Thread(target=go, daemon=True)
    with _folder(kept):
        thread.start()
        thread.join(PATIENCE_S)
    ended[outcome[0] if outcome and (met or outcome[0] != "right") else "no fault" if outcome else "hung"] += 1
    return bool(met) or not outcome


def _after(runtime: gl.Runtime | None, model: Any, right: list[Any]) -> str:
    """Return "right" if a runtime answers as before: the same one, unless the fault kept it from being loaded."""
    try:
        if runtime is not None:
            with suppress(gl.EngineError, gl.ModelError), runtime:  # it says why it did not load
                found = answers(runtime)
                thread: Any = runtime._thread
                thread.call(lambda engine: engine.check_integrity())
                return "right" if found == right else _said(found, right)
        with _opened(model) as another:
            found = answers(another)
        return "right" if found == right else _said(found, right)
    except Exception as error:
        return _said(repr(error), right)


def _said(found: Any, right: Any) -> str:
    print(f"got {found}, expected {right}")
    return "wrong"
