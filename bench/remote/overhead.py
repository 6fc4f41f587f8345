"""The cost of a call beside the bare SDK: its latency, and CPU time of the client's process.

The server runs in a process of its own and answers at once. With a thousand calls under way it answers after eight
seconds, and calls begin one after the other, so that the client is busy but not overrun: a latency is then its own work
and not the wait for all others. All sides take turns: a runtime, one SDK client, and an SDK client for each call in
flight, of which a user would have to keep account.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import openai

import graftlm as gl
from bench.harness import Options, Row
from bench.remote._instant import instant_server
from tests.core.remote.models import writes
from tests.core.remote.server import Server

BUDGET_MS = 2.0
WAITS_S = {1: 0.0, 64: 0.0, 1000: 8.0}
"""Seconds that the server takes to answer, by the number of calls in flight."""

Ask = Callable[[int], Awaitable[object]]


@dataclass(frozen=True)
class Cost:
    """Cost of a set of calls: the latency of each, and the CPU time of this process for all, in seconds."""

    latencies_s: list[float]
    cpu_s: float

    @property
    def cpu_ms(self) -> float:
        return 1000 * self.cpu_s / len(self.latencies_s)


def run(options: Options) -> Iterator[Row]:
    for num_in_flight, wait_s in WAITS_S.items():
        num_calls = max(options.choose(200, 1000), num_in_flight)
        ours, bare, apart = [], [], []
        with instant_server(wait_s) as url:
            for _ in range(1 if options.quick or wait_s else options.repeats):
                ours.append(asyncio.run(_ours(url, num_in_flight, num_calls, wait_s)))
                bare.append(asyncio.run(_bare(url, num_in_flight, num_calls, wait_s)))
                if num_in_flight == 64:
                    apart.append(asyncio.run(_bare(url, num_in_flight, num_calls, wait_s, num_clients=64)))
        where = f"{num_in_flight:,} in flight"
        p50s = _p50_ms(ours) - 1000 * wait_s, _p50_ms(bare) - 1000 * wait_s
        cpus = _cpu_ms(ours), _cpu_ms(bare)
        for what, (mine, theirs) in (
            (f"p50 of latency beyond the server's, {where}", p50s),
            (f"CPU of a call, {where}", cpus),
        ):
            yield Row("overhead", what, mine, "ms", theirs)
            yield Row("overhead", f"{what}, above the SDK's", mine - theirs, "ms", floor=BUDGET_MS, at_most=True)
        if apart:
            what = f"{where}, beside {num_in_flight} SDK clients"
            yield Row("overhead", f"p50 of latency, {what}", _p50_ms(ours), "ms", _p50_ms(apart))
            yield Row("overhead", f"CPU of a call, {what}", _cpu_ms(ours), "ms", _cpu_ms(apart))
    yield _most_in_flight(options.choose(200, 1000))


def _p50_ms(costs: list[Cost]) -> float:
    return 1000 * statistics.median(latency_s for cost in costs for latency_s in cost.latencies_s)


def _cpu_ms(costs: list[Cost]) -> float:
    return statistics.median(cost.cpu_ms for cost in costs)


async def _ours(url: str, num_in_flight: int, num_calls: int, wait_s: float) -> Cost:
    with gl.Runtime("m", base_url=url, max_in_flight=num_in_flight) as rt:
        return await _cost(lambda i: rt.agenerate(f"{i} go", max_tokens=4), num_in_flight, num_calls, wait_s)


async def _bare(url: str, num_in_flight: int, num_calls: int, wait_s: float, num_clients: int = 1) -> Cost:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
            )
            for _ in range(num_clients)
        ]

        async def ask(i: int) -> None:
            sdk = clients.pop() if num_clients > 1 else clients[0]
            await sdk.completions.create(model="m", prompt=f"{i} go", max_tokens=4)
            if num_clients > 1:
                clients.append(sdk)

        return await _cost(ask, num_in_flight, num_calls, wait_s)


async def _cost(ask: Ask, num_in_flight: int, num_calls: int, over_s: float) -> Cost:
    """Return the cost of the calls, after warm-up calls that open the connections."""
    await _all(ask, num_in_flight, num_in_flight, over_s)
    before_s = _cpu_s()
    latencies_s = await _all(ask, num_in_flight, num_calls, over_s)
    return Cost(latencies_s, _cpu_s() - before_s)


async def _all(ask: Ask, num_in_flight: int, num_calls: int, over_s: float = 0.0) -> list[float]:
    """Return the latency of each call in seconds; the first calls in flight begin spread over `over_s` seconds."""
    numbers, latencies_s = iter(range(num_calls)), []

    async def work(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for number in numbers:
            started_s = time.perf_counter()
            await ask(number)
            latencies_s.append(time.perf_counter() - started_s)

    await asyncio.gather(*(work(over_s * i / num_in_flight) for i in range(num_in_flight)))
    return latencies_s


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _most_in_flight(num: int) -> Row:
    """Return the number of calls in flight, each of which takes the server eight seconds."""
    with (
        Server(writes("x"), cached=False, seconds_per_call=8.0) as server,
        gl.Runtime("m", base_url=server.url, max_in_flight=num) as rt,
    ):
        asyncio.run(_all(lambda i: rt.agenerate(f"{i} ", max_tokens=2), num, num))
        return Row("overhead", f"{num:,} calls of eight seconds at once", server.most_in_flight, "in flight", floor=num)
