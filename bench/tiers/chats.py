"""Chats whose KV is three times the pool: an endless pool, eviction, and host memory behind the pool."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness import Options, Row, timed
from bench.tiers._setup import Sizes, converse, opened, sizes
from graftlm.core.metrics import Stats

HOST_BYTES = 28 << 30
"""Bytes on a GPU; a tiny model takes a sixteenth of one in a thousand of it."""


def run(options: Options) -> Sequence[Row]:
    return [row for of in sizes(options) for row in _chats(of)]


def _chats(of: Sizes) -> list[Row]:
    import torch

    host = max(HOST_BYTES, 144_000 * of.total) if torch.cuda.is_available() else HOST_BYTES >> 7
    ways = {
        "endless pool": {"max_tokens": 2 * of.total},
        "evicted": {"max_tokens": of.total // 3},
        "host memory": {"max_tokens": of.total // 3, "host_bytes": host},
    }
    seconds: dict[str, float] = {}
    stats: dict[str, Stats] = {}
    found: dict[str, list[list[int]]] = {}
    for name, cache in ways.items():
        with opened(**cache) as runtime:
            converse(runtime, of._replace(chats=2), seed=10**6)  # kernels and graphs
            runtime.clear_cache()
            runtime.reset_stats()
            seconds[name] = timed(lambda r=runtime, n=name: found.__setitem__(n, converse(r, of)), name)
            stats[name] = runtime.stats()
    what = (
        f"{of.chats} chats of {of.turns} turns from {of.first} tokens on, {of.total:,} in a pool of {of.total // 3:,}"
    )
    endless, evicted, kept = (stats[name].computed_tokens for name in ways)
    equal = sum(a == b for a, b in zip(found["host memory"], found["endless pool"], strict=True))
    shape = {"tier": {name: str(one.tiers) for name, one in stats.items()}, "seconds": seconds}
    return [
        Row(
            "chats",
            f"{what}: computed with host memory, baseline an endless pool",
            kept,
            "tokens",
            endless,
            kept / endless,
            1.05,
            True,
            shape=shape,
        ),
        Row("chats", f"{what}: computed without host memory", evicted, "tokens", endless, evicted / endless),
        Row(
            "chats",
            f"{what}: with host memory, baseline without",
            seconds["host memory"],
            "s",
            seconds["evicted"],
            seconds["host memory"] / seconds["evicted"],
            0.5 if torch.cuda.is_available() else None,
            True,
        ),
        Row("chats", "with an endless pool", seconds["endless pool"], "s"),
        Row("chats", "chats that end as with an endless pool", equal, "chats"),
    ]
