"""Agents that call a tool between two turns, in a pool of a third of their KV: the tokens that are computed twice.

Evicted in the order of use, held by the expected pause, and with host memory behind the pool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from bench.harness import Options, Row
from bench.models import random_ids
from bench.tiers._setup import ask, opened, sizes
from bench.tiers.chats import HOST_BYTES
from graftlm import Runtime


def run(options: Options) -> Sequence[Row]:
    import torch

    of = sizes(options)[0]._replace(chats=options.choose(8, 24), turns=options.choose(3, 4))
    pause_s = options.choose(0.3, 2.0)
    host = HOST_BYTES if torch.cuda.is_available() else HOST_BYTES >> 7
    pool = of.total // 3
    ways = {
        "endless": {"max_tokens": 2 * of.total},
        "evicted": {"max_tokens": pool},
        "held": {"max_tokens": pool},
        "kept": {"max_tokens": pool, "host_bytes": host},
        "kept and held": {"max_tokens": pool, "host_bytes": host},
    }
    computed: dict[str, int] = {}
    for name, cache in ways.items():
        with opened(**cache) as runtime:

            def agent(number: int, runtime: Runtime = runtime, holds: bool = "held" in name) -> None:
                ids = random_ids(of.first, seed=number)
                time.sleep(pause_s * number / of.chats)
                for turn in range(of.turns):
                    ids += ask(runtime, [ids], of.answer)[0]
                    if holds and turn < of.turns - 1:
                        runtime.hold(ids, pause_s)
                    time.sleep(pause_s)  # the tool
                    ids += random_ids(of.said, seed=1000 * (turn + 1) + number)

            threads = [threading.Thread(target=agent, args=(number,)) for number in range(of.chats)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            computed[name] = runtime.stats().computed_tokens
    twice = {name: computed[name] - computed["endless"] for name in ways}
    what = f"{of.chats} agents of {of.turns} turns, pauses of {pause_s} s, {of.total:,} tokens in a pool of {pool:,}"
    return [
        Row(
            "agents",
            f"{what}: computed twice {way}, baseline in the order of use",
            twice[name],
            "tokens",
            twice["evicted"],
            twice[name] / max(twice["evicted"], 1),
            floor,
            True,
            shape=computed,
        )
        for name, way, floor in (
            ("kept", "with host memory", 0.3),
            ("kept and held", "with host memory and holds", 0.3),
            ("held", "with holds alone", None),
        )
    ]
