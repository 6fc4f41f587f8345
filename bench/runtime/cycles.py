"""Opening and closing a runtime again and again in one process: objects that stay, growth of memory."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import psutil

import graftlm as gl
from bench.harness import Options, Row
from graftlm.core.program.state import ProgramState

WARM = 24  # cycles that fill bounded caches
OBSERVED = 5
"""Cycles whose smallest memory counts: the free end of a thread's heap comes and goes."""


def run(options: Options) -> Iterator[Row]:
    num = options.count or options.choose(10, 200)
    before, before_mb = _after(WARM)
    after, after_mb = _after(num)
    more = after - before
    yield Row("cycles", f"objects that stay a cycle, of {num}", more.total() / num, "objects", floor=2, at_most=True)
    yield Row(
        "cycles",
        f"memory after {num} cycles",
        after_mb,
        "MB",
        before_mb,
        after_mb / before_mb,
        floor=1.02,
        at_most=True,
    )
    for kind, count in more.most_common(5):
        if count >= num:
            yield Row("cycles", f"{kind} that stay", count, "objects")


def _after(num: int) -> tuple[Counter[str], float]:
    """Make `num` cycles. -> the objects that are left, and the smallest memory in MB after each of the last cycles"""
    smallest = float("inf")
    for i in range(num):
        _cycle()
        if i >= num - OBSERVED:
            left, memory_mb = _left()
            smallest = min(smallest, memory_mb)
    return left, smallest


def _cycle() -> None:
    """Open a runtime, use a constraint, a program and a stream, and close it."""
    with gl.Runtime("sprout") as runtime:
        runtime.generate("hello", max_tokens=4, regex="[0-9]{3}")
        gl.program(_chat).run(runtime=runtime)["answer"]
        for _ in runtime.stream("hello", max_tokens=4):
            pass


def _chat(s: ProgramState) -> None:
    s += gl.user("hello") + gl.assistant(gl.gen("answer", max_tokens=3))


def _left() -> tuple[Counter[str], float]:
    """Return the collectable objects by type, and the resident memory in MB."""
    for thread in threading.enumerate():
        if thread.name == "graftlm grammar":
            thread.join()
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that the C library holds free is not counted
    counts = Counter(str(type(found)) for found in gc.get_objects())
    return counts, psutil.Process().memory_info().rss / 1e6
