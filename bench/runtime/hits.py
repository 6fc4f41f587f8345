"""Cached tokens against the best possible: an infinite cache and an ideal order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.harness import Options, Row
from bench.models import GREEDY, random_ids, runtime
from graftlm import CacheConfig, Completion, Runtime


class Ideal:
    """A cache that never forgets: counts what a prompt would find in it. One token of each prompt always runs."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}
        self.num_cached = 0

    def see(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        node, matched, matching = self._root, 0, True
        for token in [*prompt, *answer]:
            matching = matching and token in node
            matched += matching
            node = node.setdefault(token, {})
        self.num_cached += min(matched, len(prompt) - 1)


Ask = Callable[[list[list[int]]], list[Completion]]


def tree(ask: Ask, width: int) -> None:
    """Build questions under one common block, each branching three levels deep; all branches continue."""
    common = random_ids(256, seed=1)
    frontier = [common + random_ids(96, seed=10 + i) for i in range(width)]
    for level in range(3):
        grown = [p + random_ids(16, seed=1000 * level + 10 * i + b) for i, p in enumerate(frontier) for b in range(3)]
        done = ask(grown)
        frontier = [prompt + c.token_ids for prompt, c in zip(grown, done, strict=True)][:: 3 if level else 1]


def chat(ask: Ask, width: int) -> None:
    """Build conversations of four turns under one system prompt; a turn continues the previous answer."""
    system = random_ids(128, seed=2)
    histories = [system for _ in range(width * 3)]
    for turn in range(4):
        asked = [h + random_ids(40, seed=5000 + 100 * turn + i) for i, h in enumerate(histories)]
        histories = [prompt + c.token_ids for prompt, c in zip(asked, ask(asked), strict=True)]


def few_shot(ask: Ask, width: int) -> None:
    """Build questions behind a few different sets of examples, mixed."""
    shots = [random_ids(400, seed=7000 + i) for i in range(4)]
    ask([shots[i % 4] + random_ids(30, seed=8000 + i) for i in range(width * 8)])


WORKLOADS = {"tree": tree, "chat": chat, "few-shot": few_shot}


def measure(engine: Runtime, workload: Callable[[Ask, int], None], width: int) -> tuple[int, int]:
    """Cached prompt tokens of the engine and of the ideal."""
    ideal = Ideal()
    engine.clear_cache()
    engine.reset_stats()

    def ask(prompts: list[list[int]]) -> list[Completion]:
        with ThreadPoolExecutor(len(prompts)) as pool:  # as callers come: one thread each, in any order
            done = list(pool.map(lambda p: engine.generate(p, max_tokens=8, **GREEDY), prompts))
        for prompt, completion in zip(prompts, done, strict=True):
            ideal.see(prompt, completion.token_ids)
        return done

    workload(ask, width)
    return engine.stats().cached_tokens, ideal.num_cached


# The second pool is smaller than what the chats need at once: what an infinite cache finds is then out of reach.
POOLS = {8192: 0.96, 4096: None}


def run(options: Options) -> Sequence[Row]:
    rows = []
    width = options.choose(4, 8)
    for pool, floor in POOLS.items():
        with runtime("tiny", cache=CacheConfig(max_tokens=pool), max_batch=16) as engine:
            for name, workload in WORKLOADS.items():
                ours, best = measure(engine, workload, width)
                what = f"{name}, batch 16, pool of {pool:,}"
                rows.append(Row("hits", what, ours, "tokens", best, ratio=ours / best, floor=floor))
    return rows
