"""Many requests with one long prefix: no reuse, the radix tree, and shared-prefix decode on top of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.harness import Options, Row, paired
from bench.models import GREEDY, random_ids, runtime
from graftlm import CacheConfig, Runtime


def run(options: Options) -> Sequence[Row]:
    num_requests, num_shared, num_own, num_new = options.choose((16, 400, 24, 8), (64, 1000, 24, 32))
    shared = random_ids(num_shared, seed=1)
    prompts = [shared + random_ids(num_own, seed=100 + i) for i in range(num_requests)]
    answers: dict[str, list[list[int]]] = {}

    def ask(name: str, engine: Runtime) -> Callable[[], None]:
        def once() -> None:
            engine.clear_cache()
            answers[name] = [c.token_ids for c in engine.generate(prompts, max_tokens=num_new, **GREEDY)]

        return once

    with (
        runtime("30M", cache=CacheConfig(enabled=False), shared_prefix_decode=False) as nothing,
        runtime("30M", shared_prefix_decode=False) as tree,
        runtime("30M") as both,
    ):
        engines = {"no reuse": nothing, "radix tree": tree, "and shared-prefix decode": both}
        times = paired({name: ask(name, engine) for name, engine in engines.items()}, options.repeats, warm=False)
        computed = {name: engine.stats().computed_tokens // options.repeats for name, engine in engines.items()}
    base = times["no reuse"].median
    rows = [
        Row(
            "reuse",
            f"{num_requests} x ({num_shared} shared + {num_own}), {num_new} new: {name}",
            times[name].median,
            "s",
            baseline=base,
            ratio=base / times[name].median,
            floor=None if options.quick else floor,
            low=min(times[name].samples),
            high=max(times[name].samples),
            shape={"model": "30M float32", "computed_tokens": computed[name]},
        )
        for name, floor in (("radix tree", 8.0), ("and shared-prefix decode", 9.5))
    ]
    equal = sum(a == b == c for a, b, c in zip(*answers.values(), strict=True))
    return [*rows, Row("reuse", "answers identical in all three", equal, "answers", floor=num_requests)]
