"""64 streaming clients over HTTP beside the same 64 in process, and what a chunk costs the server's event loop.

The clients of the server speak HTTP through bare sockets and share this process with nothing but the in-process
runtime, which is idle then; the server is a process of its own. Its event loop runs on its main thread, whose CPU time
the system counts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

import graftlm as gl
from bench.harness import Options, Row, paired, rate_row
from graftlm.core.request import Request
from tests.served import Served, started

CLIENTS = 64
TOKENS = 64
HEAD = "Rules of the house. Answer in a few words and keep to the facts that are given here. " * 4
SAMPLING = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def prompts(num: int) -> list[str]:
    return [f"{HEAD}Person {i} is {20 + i % 50} years old. Tell a story about person {i}." for i in range(num)]


def run(options: Options) -> Sequence[Row]:
    texts = prompts(CLIENTS * options.choose(1, 4))
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), "sprout", "--option", "dtype=float32") as served,
        gl.Runtime("sprout", dtype="float32") as runtime,
    ):
        served.wait_ready()
        runtime.load()
        chunks: list[int] = []
        loop_s: list[float] = []

        def over_http() -> None:
            before = loop_seconds(served)
            chunks.append(asyncio.run(_over_http(served, texts)))
            loop_s.append(loop_seconds(served) - before)

        def in_process() -> None:
            asyncio.run(_in_process(runtime, texts))

        times = paired({"over HTTP": over_http, "in process": in_process}, options.repeats)
    what = f"{len(texts)} requests of {CLIENTS} clients, {TOKENS} tokens each, streamed"
    rate = rate_row("throughput", what, "requests/s", len(texts), times["over HTTP"], times["in process"], floor=0.9)
    cost = sorted(1e6 * s / n for s, n in zip(loop_s[1:], chunks[1:], strict=True))
    middle = cost[len(cost) // 2]
    row = Row(
        "throughput", "CPU time of the loop per chunk", middle, "us", floor=60, at_most=True, low=cost[0], high=cost[-1]
    )
    return [rate, row]


def loop_seconds(served: Served) -> float:
    """CPU time that the main thread of the server has used, in seconds."""
    pid = served.process.pid
    main = next(one for one in psutil.Process(pid).threads() if one.id == pid)
    return float(main.user_time + main.system_time)


async def _in_process(runtime: gl.Runtime, texts: list[str]) -> None:
    waiting = iter(texts)

    async def client() -> None:
        for text in waiting:
            async for _ in runtime.submit_astream(Request(text, gl.SamplingParams(**SAMPLING), stream=True)):
                pass

    runtime.clear_cache()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def _over_http(served: Served, texts: list[str]) -> int:
    """Return the number of received chunks."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    waiting, num_chunks = iter(texts), 0

    async def client() -> None:
        nonlocal num_chunks
        reader, writer = await asyncio.open_connection(host, int(port))
        for text in waiting:
            body = json.dumps({"model": "sprout", "prompt": text, "stream": True, **SAMPLING}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}"
            writer.write(head.encode() + b"\r\n\r\n" + body)
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                piece = await reader.read(1 << 16)
                assert piece, received[-500:]
                num_chunks += piece.count(b"data: {")
                received = received[-8:] + piece
        writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return num_chunks
