"""Prompts that share nothing, through a full pool: the cost of saving all that is evicted, and of each lookup."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

from bench.harness import Options, Row, timed
from bench.models import random_ids
from bench.tiers._setup import ask, opened
from bench.tiers.chats import HOST_BYTES
from graftlm import Runtime


def run(options: Options) -> Sequence[Row]:
    import torch

    cuda = torch.cuda.is_available()
    num_prompts, length, num_new, pool = (192, 1024, 16, 45_000) if cuda else (options.choose(8, 16), 600, 16, 4_000)
    ways: dict[str, dict[str, int]] = {"without": {}, "with": {"host_bytes": HOST_BYTES if cuda else HOST_BYTES >> 4}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    saved = 0

    def once(runtime: Runtime, name: str, seed: int) -> None:
        prompts = [random_ids(length, seed=seed * 1000 + i) for i in range(num_prompts)]
        seconds[name].append(timed(lambda: ask(runtime, prompts, num_new), name))

    with ExitStack() as stack:
        engines = {} if cuda else {n: stack.enter_context(opened("30M", max_tokens=pool, **o)) for n, o in ways.items()}
        for name, cache in ways.items():
            with opened(max_tokens=pool, **cache) if cuda else nullcontext(engines[name]) as runtime:
                for seed in range(4 if cuda else 1):
                    once(runtime, name, seed)
                saved += runtime.stats().tiers["host"].saved_tokens if name == "with" else 0
        for seed in range(1, 1 + (0 if cuda else 2 * options.repeats)):
            for name, runtime in engines.items():
                once(runtime, name, seed)
    for taken in seconds.values():
        del taken[0]  # the pool was not full
    ours, theirs = (min(seconds[name]) for name in ("with", "without"))
    what = f"{num_prompts} x ({length} own + {num_new} new), best run with host memory, baseline without"
    return [
        Row(
            "nothing",
            what,
            ours,
            "s",
            theirs,
            ours / theirs,
            1.02,
            True,
            low=min(seconds["with"]),
            high=max(seconds["with"]),
            shape={"seconds": seconds, "saved_tokens": saved},
        ),
        Row(
            "nothing",
            "the same, medians",
            statistics.median(seconds["with"]),
            "s",
            statistics.median(seconds["without"]),
            statistics.median(seconds["with"]) / statistics.median(seconds["without"]),
        ),
    ]
