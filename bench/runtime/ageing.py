"""Waiting time of a request without a cached prefix, while requests that hit the cache keep arriving."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from bench.harness import Options, Row, timed
from bench.models import GREEDY, random_ids, runtime
from graftlm import SchedulerConfig

NUM_CALLERS = 12
MAX_BATCH = 2


def run(options: Options) -> Sequence[Row]:
    max_age_s = 0.5
    shared = random_ids(200, seed=1)
    num_loners = options.choose(3, 10)
    waits: list[float] = []
    turns: list[float] = []
    with runtime("tiny", max_batch=MAX_BATCH, schedule=SchedulerConfig(policy="lpm", max_age_s=max_age_s)) as engine:
        alone_s = timed(lambda: engine.generate(random_ids(300, seed=2), max_tokens=1, **GREEDY))
        stop = threading.Event()

        def newcomers(first: int) -> None:
            seed = first
            while not stop.is_set():
                prompt = shared + random_ids(8, seed)
                started = time.perf_counter()
                engine.generate(prompt, max_tokens=16, **GREEDY)
                turns.append(time.perf_counter() - started)
                seed += 100

        crowd = [threading.Thread(target=newcomers, args=(1000 + i,)) for i in range(NUM_CALLERS)]
        for thread in crowd:
            thread.start()
        for i in range(num_loners):
            started = time.perf_counter()
            engine.generate(random_ids(300, seed=50 + i), max_tokens=1, **GREEDY)
            waits.append(time.perf_counter() - started)
        stop.set()
        for thread in crowd:
            thread.join()
    # Younger requests may go first for the length of the age cap; then at most those that were there before it, and
    # those that run, which together take no longer than the slowest caller's own turn through the same queue.
    bound = max_age_s + max(turns) + 2 * alone_s
    waits.sort()
    return [
        Row(
            "ageing",
            f"worst answer time of {num_loners} loners among {NUM_CALLERS} callers with a cached prefix, "
            f"age cap {max_age_s} s; the floor adds the callers' slowest turn",
            waits[-1],
            "s",
            baseline=alone_s,
            floor=round(bound, 2),
            at_most=True,
            low=waits[0],
            high=waits[-1],
        )
    ]
