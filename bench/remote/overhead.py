"""What a call costs beside the bare SDK, and a thousand calls at the same time, on a server that answers at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import openai

import graftlm as gl
from bench.harness import Options, Row
from tests.core.remote.models import writes
from tests.core.remote.server import Server

BUDGET_MS = 2.0


def median_ms(samples: Sequence[float]) -> float:
    return 1000 * statistics.median(samples)


def run(options: Options) -> Sequence[Row]:
    num = options.choose(50, 400)
    rows = []
    with Server(writes("x"), cached=False) as server, gl.Runtime("m", base_url=server.url) as rt:
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as bare:
            ours, theirs = [], []
            for i in range(num + 10):
                start = time.perf_counter()
                rt.generate("go ", max_tokens=4)
                middle = time.perf_counter()
                bare.completions.create(model="m", prompt="go ", max_tokens=4)
                if i >= 10:
                    ours.append(middle - start)
                    theirs.append(time.perf_counter() - middle)
        above = median_ms(ours) - median_ms(theirs)
        rows.append(Row("overhead", "one call, above the SDK's own", above, "ms", floor=BUDGET_MS, at_most=True))
        rows.append(Row("overhead", "one call", median_ms(ours), "ms", median_ms(theirs)))
    with Server(writes("x"), cached=False, seconds_per_call=1.0) as server:
        rows.append(in_flight(server, options.choose(200, 1000)))
    return rows


def in_flight(server: Server, num: int) -> Row:
    """Calls that are under way at once; each takes the server a second."""
    with gl.Runtime("m", base_url=server.url, max_in_flight=num) as rt:
        start = time.perf_counter()
        asyncio.run(_all(rt, num))
        seconds = time.perf_counter() - start
    what = f"{num:,} calls of a second at once, in {seconds:.1f} s"
    return Row("overhead", what, server.most_in_flight, "in flight", num, floor=float(num))


async def _all(rt: gl.Runtime, num: int) -> None:
    await rt.agenerate([f"{i} " for i in range(num)], max_tokens=2)
