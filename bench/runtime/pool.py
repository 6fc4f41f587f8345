"""A workload whose KV is five times the pool finishes, with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness import Options, Row
from bench.models import GREEDY, random_ids, runtime
from graftlm import CacheConfig


def run(options: Options) -> Sequence[Row]:
    num_requests, num_prompt, num_new = options.choose((20, 60, 40), (40, 150, 100))
    prompts = [random_ids(num_prompt, seed=i) for i in range(num_requests)]
    pool = num_requests * (num_prompt + num_new) // 5
    with runtime("tiny") as roomy:
        expected = [c.token_ids for c in roomy.generate(prompts, max_tokens=num_new, **GREEDY)]
    with runtime("tiny", cache=CacheConfig(max_tokens=pool)) as tight:
        got = [c.token_ids for c in tight.generate(prompts, max_tokens=num_new, **GREEDY)]
        stats = tight.stats()
    equal = sum(a == b for a, b in zip(got, expected, strict=True))
    lost = stats.slots_total - stats.slots_free - stats.slots_cached - stats.slots_in_use
    return [
        Row("pool", f"KV five times a pool of {pool:,}", equal, f"of {num_requests} equal", floor=num_requests),
        Row("pool", "slots unaccounted for afterwards", lost, "slots", floor=0, at_most=True),
        Row("pool", "requests put back when the pool was full", stats.retracted, "retractions"),
    ]
