"""What a streamed chunk costs the server's process: CPU time beside the same answers sent whole.

A model so small that its forward pass hardly counts writes for 256 clients at a time, as a GPU does. The CPU time of
the whole process is counted, since its event loop and the engine's thread share one interpreter lock.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.harness import Options, Row
from tests.models import byte_tokenizer, tiny_model
from tests.served import Served, started

CLIENTS = 256
SAMPLING = {"temperature": 0, "ignore_eos": True}
BODIES = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once upon a time"}]},
}


def run(options: Options) -> Sequence[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(num_hidden_layers=1).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        settings = ["--option", f"max_batch={CLIENTS}", "--option", "dtype=float32", "--option", "device=cpu"]
        with started(folder, str(folder), *settings, OMP_NUM_THREADS="1") as served:
            served.wait_ready()
            for path in BODIES:
                _, *costs = (_cost_us(served, path, options.choose(128, 256)) for _ in range(options.repeats + 1))
                costs.sort()
                what = f"{path}, {CLIENTS} clients: CPU time of the process per chunk"
                middle = statistics.median(costs)
                rows.append(Row("chunks", what, middle, "us", floor=40, at_most=True, low=costs[0], high=costs[-1]))
    return rows


def _cost_us(served: Served, path: str, num_tokens: int) -> float:
    """CPU time of a chunk, in microseconds: what streaming adds to the same answers sent whole."""
    whole_s, _ = asyncio.run(_ask(served, path, num_tokens, stream=False))
    streamed_s, num_chunks = asyncio.run(_ask(served, path, num_tokens, stream=True))
    return 1e6 * (streamed_s - whole_s) / num_chunks


async def _ask(served: Served, path: str, num_tokens: int, *, stream: bool) -> tuple[float, int]:
    """CPU seconds of the server while it answers all clients once, and the chunks that came."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    body = json.dumps(BODIES[path] | SAMPLING | {"max_tokens": num_tokens, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"

    async def client() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        answer = await reader.read(-1)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        return answer.count(b"data: {")

    process = psutil.Process(served.process.pid)
    before = process.cpu_times()
    counts = await asyncio.gather(*(client() for _ in range(CLIENTS)))
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system, sum(counts)
