"""The cost of streaming in the server's process: 256 clients at an engine with the step times of an H200.

The device is a clock (`bench/frameworks/_paced.py`). The server's event loop and the engine's thread share one process
and one interpreter lock, as in `graftlm serve`; the clients are a process of their own. The baseline is the same
requests in process, not streamed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import graftlm as gl
from bench.frameworks._paced import paced_runtime
from bench.harness import Options, Row
from graftlm.adapters.server import Server, ServerSettings
from graftlm.adapters.server.process import Process, listen
from graftlm.core.request import Request
from graftlm.kernels.jit import python_process

CLIENTS = 256
BODIES = {
    "/v1/completions": {"prompt": "Once upon a time"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Once upon a time"}]},
}


def run(options: Options) -> Sequence[Row]:
    rows, num_tokens = [], options.choose(64, 256)
    with paced_runtime() as (runtime, _), serving(runtime) as (port, loop_thread):
        for path in BODIES:
            loop_us, process_us, token_ms, step_ms = [], [], [], []
            for _ in range(options.repeats + 1):
                plain_s, process_s = _in_process(runtime, num_tokens)
                loop_s, served_process_s, served_s, chunks = _over_http(port, loop_thread, path, num_tokens)
                loop_us.append(1e6 * loop_s / chunks)
                process_us.append(1e6 * (served_process_s - process_s) / chunks)
                token_ms.append(1e3 * served_s / num_tokens)
                step_ms.append(1e3 * plain_s / num_tokens)
            what = f"{path}, {CLIENTS} clients"
            rows.append(_row(f"{what}: CPU time of the loop per chunk", loop_us[1:], "us", floor=60))
            rows.append(_row(f"{what}: CPU time of the process per chunk", process_us[1:], "us", floor=60))
            ratio = statistics.median(a / b for a, b in zip(token_ms[1:], step_ms[1:], strict=True))
            middle = statistics.median(token_ms[1:])
            base = statistics.median(step_ms[1:])
            rows.append(Row("chunks", f"{what}: wall time per token", middle, "ms", baseline=base, ratio=ratio))
    return rows


def _row(what: str, samples: list[float], unit: str, floor: float) -> Row:
    middle = statistics.median(samples)
    return Row("chunks", what, middle, unit, floor=floor, at_most=True, low=min(samples), high=max(samples))


@contextmanager
def serving(runtime: gl.Runtime) -> Iterator[tuple[int, int]]:
    """Run a server in this process on its own thread; yield its port and the thread's id."""
    listener = listen("127.0.0.1", 0)
    process = Process(Server(runtime, ServerSettings(port=0)), listener)
    thread = threading.Thread(target=process.run, name="bench server")
    thread.start()
    try:
        runtime.load()
        while not process.started:
            time.sleep(0.01)
        assert thread.ident is not None
        yield listener.getsockname()[1], thread.ident
    finally:
        process.should_exit = True
        thread.join()
        listener.close()


def _in_process(runtime: gl.Runtime, num_tokens: int) -> tuple[float, float]:
    """Wall and CPU seconds of the requests, without a server."""
    sampling = gl.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    started, cpu = time.perf_counter(), time.process_time()
    for future in runtime.submit_many([Request("Once upon a time", sampling) for _ in range(CLIENTS)]):
        future.result()
    return time.perf_counter() - started, time.process_time() - cpu


def _over_http(port: int, loop_thread: int, path: str, num_tokens: int) -> tuple[float, float, float, int]:
    """CPU seconds of the loop and of the process, wall seconds, and chunks, of the requests streamed."""
    body = {**BODIES[path], "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    clock = time.pthread_getcpuclockid(loop_thread)
    loop, cpu = time.clock_gettime(clock), time.process_time()
    command = ["-c", f"from bench.serve.chunks import ask; ask({port}, {path!r}, {json.dumps(body)!r})"]
    done = python_process.run(command, capture_output=True, text=True, check=True)
    chunks, seconds = done.stdout.split()
    return time.clock_gettime(clock) - loop, time.process_time() - cpu, float(seconds), int(chunks)


def ask(port: int, path: str, body: str) -> None:
    """Run the clients; print the received chunks and the seconds from the first request to the last chunk."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"

    async def client() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + body).encode())
        answer = await reader.read(-1)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
        return answer.count(b"data: {")

    async def clients() -> int:
        return sum(await asyncio.gather(*(client() for _ in range(CLIENTS))))

    started = time.perf_counter()
    print(asyncio.run(clients()), time.perf_counter() - started)
