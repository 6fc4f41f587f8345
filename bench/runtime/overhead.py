"""The cost of the radix tree and the scheduler without shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness import Options, Row, timed
from bench.models import GREEDY, Size, random_ids, runtime

CEILINGS: dict[Size, float] = {"30M": 5.0, "450M": 1.0}


def run(options: Options) -> Sequence[Row]:
    rows = []
    num_requests, num_prompt, num_new = 8, 128, options.choose(8, 32)
    for size in options.choose(("30M",), ("30M", "450M")):
        with runtime(size) as engine:
            shares = []
            for repeat in range(options.repeats):
                asked = [random_ids(num_prompt, seed=1000 * repeat + i) for i in range(num_requests)]
                engine.reset_stats()
                wall_s = timed(lambda asked=asked: engine.generate(asked, max_tokens=num_new, **GREEDY))
                stats = engine.stats()
                shares.append(100 * (stats.schedule_s + stats.commit_s) / wall_s)
        shares.sort()
        rows.append(
            Row(
                "overhead",
                f"schedule and commit, {num_requests} x {num_prompt} own, {num_new} new, {size}",
                shares[len(shares) // 2],
                "% of wall time",
                floor=CEILINGS[size],
                at_most=True,
                low=shares[0],
                high=shares[-1],
            )
        )
    return rows
