"""A disk that is full: caches on a file system of a few kilobytes, at several sizes, and then on one with room.

Needs the right to mount a tmpfs (root). With the cache folder and the folder of cached KV there, a runtime loads and
gives the right answers at each size, and keeps what fits.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import graftlm as gl
from bench.faults.every_nth import answers
from bench.harness import Options, Row
from graftlm.core.grammar.cache import _shared as grammars

SIZES = ("4k", "16k", "64k", "256k", "1m", "4m", "16m", "64m")
ROOM = "512m"


def run(options: Options) -> Iterator[Row]:
    with TemporaryDirectory() as folder, _mounted(folder, ROOM) as mounted:
        if not mounted:
            yield Row("full_disk", "sizes tried, 0: no right to mount a tmpfs", 0, "runs")
            return
        right = _answers_in(folder)
    wrong = kept = 0
    sizes = SIZES[:: options.choose(3, 1)]
    for size in sizes:
        with TemporaryDirectory() as folder, _mounted(folder, size):
            found = [_answers_in(folder)]
            kept += sum(path.is_file() for path in Path(folder).rglob("*"))
            _mount(folder, ROOM, again=True)  # the user has made room
            found.append(_answers_in(folder))
            wrong += sum(one != right for one in found)
    yield Row("full_disk", "sizes of a disk", len(sizes), "runs")
    yield Row("full_disk", "wrong answers, or errors", wrong, "runs", floor=0, at_most=True)
    yield Row("full_disk", "files that had room", kept, "files")


def _answers_in(folder: str) -> list[object]:
    """Return the answers of a runtime that keeps everything in a folder; the error if it has none."""
    os.environ["GRAFTLM_CACHE_DIR"] = str(Path(folder, "cache"))
    grammars.clear()
    kept = Path(folder, "kv")
    cache = gl.CacheConfig(max_tokens=2048, folder=str(kept))
    try:
        with gl.Runtime("sprout", cache=cache, dtype="float32") as runtime:
            return answers(runtime)
    except Exception as error:
        print(f"{folder}: {error!r}")
        return [repr(error)]


@contextmanager
def _mounted(folder: str, size: str) -> Iterator[bool]:
    done = _mount(folder, size)
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", folder], check=False)


def _mount(folder: str, size: str, *, again: bool = False) -> bool:
    how = f"{'remount,' if again else ''}size={size},mode=0700"
    try:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder], capture_output=True).returncode == 0
    except OSError:  # a system without the program
        return False
