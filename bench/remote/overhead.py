"""What a call costs beside the bare SDK: CPU time of the client's process, and a thousand calls at the same time.

The server answers at once, in a process of its own. CPU time, since wall time on a shared machine is other processes'.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
from collections.abc import Awaitable, Callable, Sequence

import openai

import graftlm as gl
from bench.harness import Options, Row
from bench.remote._instant import instant_server
from tests.core.remote.models import writes
from tests.core.remote.server import Server

BUDGET_MS = 2.0
IN_FLIGHT = (1, 64, 1000)

Ask = Callable[[int], Awaitable[object]]


def run(options: Options) -> Sequence[Row]:
    rows = []
    for num_in_flight in IN_FLIGHT:
        num_calls = max(options.choose(200, 1000), num_in_flight)
        with instant_server(0.5 if num_in_flight == 1000 else 0.0) as url:
            pairs = [
                (asyncio.run(_ours(url, num_in_flight, num_calls)), asyncio.run(_bare(url, num_in_flight, num_calls)))
                for _ in range(options.choose(1, 5))
            ]
        ours, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
        what = f"CPU of a call, {num_in_flight:,} in flight"
        rows.append(Row("overhead", what, ours, "ms", bare))
        rows.append(Row("overhead", f"{what}, above the SDK's", ours - bare, "ms", floor=BUDGET_MS, at_most=True))
    rows.append(_most_in_flight(options.choose(200, 1000)))
    return rows


async def _ours(url: str, num_in_flight: int, num_calls: int) -> float:
    with gl.Runtime("m", base_url=url, max_in_flight=num_in_flight) as rt:
        return await _cpu_ms(lambda i: rt.agenerate(f"{i} go", max_tokens=4), num_in_flight, num_calls)


async def _bare(url: str, num_in_flight: int, num_calls: int) -> float:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120.0) as sdk:
        return await _cpu_ms(
            lambda i: sdk.completions.create(model="m", prompt=f"{i} go", max_tokens=4), num_in_flight, num_calls
        )


async def _cpu_ms(ask: Ask, num_in_flight: int, num_calls: int) -> float:
    """CPU time of this process for each call, in milliseconds, after as many calls as are in flight."""
    await _all(ask, num_in_flight, num_in_flight)
    before = _cpu_s()
    await _all(ask, num_in_flight, num_calls)
    return 1000 * (_cpu_s() - before) / num_calls


async def _all(ask: Ask, num_in_flight: int, num_calls: int) -> None:
    numbers = iter(range(num_calls))

    async def work() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(work() for _ in range(num_in_flight)))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _most_in_flight(num: int) -> Row:
    """Calls that are under way at once; each takes the server a second."""
    with (
        Server(writes("x"), cached=False, seconds_per_call=1.0) as server,
        gl.Runtime("m", base_url=server.url, max_in_flight=num) as rt,
    ):
        asyncio.run(_all(lambda i: rt.agenerate(f"{i} ", max_tokens=2), num, num))
        return Row("overhead", f"{num:,} calls of a second at once", server.most_in_flight, "in flight", floor=num)
