"""The p50 of a steady client beside 64 streams with disconnects, slow readers and 5 MB to tokenise.

The baseline is the same steady client beside 64 honest streams, which keep as many decode rows busy. The server and the
steady client have normal priority; the streams come from a process at nice 19, which yields the processors to them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness import Options, Row
from bench.hostile.attacks import took_ms as times_ms
from bench.serve.throughput import loop_seconds
from graftlm.kernels.jit import python_process
from tests.served import Served, started

STREAMS = 64
DISCONNECTING = 16
"""Streams of the 64 that close in the middle and begin again."""
SLOW = 8
"""Streams of the 64 whose client reads 2 kB a second."""
DISCONNECTS = 128
TOKENIZED = "the sea is blue " * 327_680  # 5 MiB


def run(options: Options) -> Iterator[Row]:
    seconds = options.choose(6, 20)
    alone_ms: list[float] = []
    honest_ms: list[float] = []
    hostile_ms: list[float] = []
    figures: dict[str, list[dict[str, float]]] = {"honest": [], "hostile": []}
    with TemporaryDirectory() as folder, started(Path(folder), "sprout", "--option", "dtype=float32") as served:
        served.wait_ready()
        port = int(served.url.rsplit(":", 1)[1])
        times_ms(port, 1)
        for _ in range(options.repeats):
            alone_ms.append(statistics.median(times_ms(port, seconds / 2)))
            for kind, into in (("honest", honest_ms), ("hostile", hostile_ms)):
                took, figure = _beside(served, port, kind, seconds)
                into.append(statistics.median(took))
                figures[kind].append(figure)
    what = f"steady client beside {STREAMS} streams"
    base = statistics.median(alone_ms)
    yield Row("load", "steady client alone, p50", base, "ms", low=min(alone_ms), high=max(alone_ms))
    honest, hostile = statistics.median(honest_ms), statistics.median(hostile_ms)
    yield Row("load", f"{what}, p50 (baseline: alone)", honest, "ms", baseline=base, ratio=honest / base)
    ratio = statistics.median(b / a for a, b in zip(honest_ms, hostile_ms, strict=True))
    more = f"{DISCONNECTS} disconnects, {SLOW} slow readers, 5 MB to tokenise"
    spread: dict[str, Any] = {"low": min(hostile_ms), "high": max(hostile_ms), "floor": 1.2, "at_most": True}
    yield Row("load", f"{what}, {more}: p50", hostile, "ms", baseline=honest, ratio=ratio, **spread)
    for name, unit in (("tokens", "tokens/s"), ("chunk_us", "us"), ("disconnects", ""), ("tokenized", "")):
        of = {kind: statistics.median(one[name] for one in each) for kind, each in figures.items()}
        label = {
            "tokens": "generated",
            "chunk_us": "CPU time of the loop per token",
            "tokenized": "5 MB texts tokenised",
        }
        yield Row("load", label.get(name, name), of["hostile"], unit, baseline=of["honest"])


def _beside(served: Served, port: int, kind: str, seconds: float) -> tuple[list[float], dict[str, float]]:
    """Return the steady client's times beside a load, and the load's figures."""
    command = ("-m", "bench.serve.load", kind, str(port), str(seconds))
    with python_process.start(command, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None
        load.stdout.readline()  # all streams have begun
        marks = [_mark(served)]
        took: list[list[float]] = []
        while load.poll() is None:
            took.append(times_ms(port, 0.5))
            marks.append(_mark(served))
        counts = json.loads(load.stdout.readline())
    over_s = counts.pop("over_s")
    kept = max(1, sum(mark[0] <= over_s for mark in marks[1:]))  # rounds that ended before the load did
    seconds, loop_s, tokens = (b - a for a, b in zip(marks[0], marks[kept], strict=True))
    figures = {"tokens": tokens / seconds, "chunk_us": 1e6 * loop_s / max(1, tokens), **counts}
    return [one for each in took[:kept] for one in each], figures


def _mark(served: Served) -> tuple[float, float, float]:
    """Return the time, the loop's CPU time and the generated tokens, up to here."""
    return time.monotonic(), loop_seconds(served), _generated(served)


def _generated(served: Served) -> float:
    lines = served.get("/metrics")[1].splitlines()
    return float(next(one for one in lines if one.startswith("vllm:generation_tokens_total{")).rsplit(" ", 1)[1])


# -- the process of the streams -------------------------------------------------------------------------------------


class Load:
    """64 streams that begin again when they end, until `seconds` are over and all disconnects have happened."""

    def __init__(self, port: int, seconds: float, hostile: bool) -> None:
        self.port = port
        self.hostile = hostile
        self.end_s = time.monotonic() + seconds
        self.period_s = 0.9 * seconds * DISCONNECTING / DISCONNECTS
        self.num_open = 0
        self.disconnects = 0
        self.tokenized = 0

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end_s and (not self.hostile or self.disconnects >= DISCONNECTS)

    async def run(self) -> None:
        closing = DISCONNECTING if self.hostile else 0
        slow = SLOW if self.hostile else 0
        streams = [self._streams(i, i < closing, closing <= i < closing + slow) for i in range(STREAMS)]
        tasks = [asyncio.create_task(one) for one in streams]
        if self.hostile:
            tasks.append(asyncio.create_task(self._tokenize()))
        while self.num_open < STREAMS:
            await asyncio.sleep(0.01)
        print("begun", flush=True)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        over_s = time.monotonic()
        await asyncio.gather(*tasks)
        counts = {"over_s": over_s, "disconnects": self.disconnects, "tokenized": self.tokenized}
        print(json.dumps(counts), flush=True)

    async def _streams(self, number: int, closes: bool, slow: bool) -> None:
        """Run one stream after the other. closes: each is closed after a period; slow: 64 bytes at 30 Hz are read"""
        counted = False
        turn = 0
        while not self.over:
            turn += 1
            text = f"Tell a long story about person {number}, who is {turn} years old."
            body = {"prompt": text, "stream": True, "max_tokens": 1500, "ignore_eos": True}
            reader, writer = await self._sent("/v1/completions", body, small=slow)
            end_s = time.monotonic() + self.period_s
            head = await reader.readline()
            if b" 200 " not in head:
                raise RuntimeError(head + await reader.read(2000))
            self.num_open += not counted
            counted = True
            with suppress(ConnectionError):
                while not self.over and not (closes and time.monotonic() > end_s):
                    piece = await reader.read(64 if slow else 1 << 16)
                    if not piece or piece.endswith(b"\r\n0\r\n\r\n"):
                        break
                    if slow:
                        await asyncio.sleep(1 / 30)
            self.disconnects += closes and time.monotonic() >= end_s
            writer.transport.abort()

    async def _tokenize(self) -> None:
        while not self.over:
            reader, writer = await self._sent("/tokenize", {"prompt": TOKENIZED}, small=False)
            await reader.readline()
            await reader.read(1 << 20)
            writer.close()
            self.tokenized += 1
            await asyncio.sleep(0.05)

    async def _sent(
        self, path: str, body: dict[str, Any], small: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own. small: with the least receive buffer of the system"""
        connection = socket.socket()
        if small:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=256 if small else 1 << 16)
        content = json.dumps({"model": "sprout", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        with suppress(ConnectionError):  # a refused body is closed before it has been read
            await writer.drain()
        return reader, writer


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(Load(int(sys.argv[2]), float(sys.argv[3]), hostile=sys.argv[1] == "hostile").run())
