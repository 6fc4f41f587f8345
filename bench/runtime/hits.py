"""Cached tokens against the best possible: an infinite cache and an ideal order.

On a model of attention layers, and on a hybrid, which can go on only where a state was kept. Counts, no times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import graftlm as gl
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


def dropped_thoughts(ask: Ask, width: int) -> None:
    """Build conversations of four turns whose template drops the first tokens of each answer from the next prompt.

    Half of them start after the others have ended: nothing says before the first second turn where prompts will part.
    """
    system, marker = random_ids(128, seed=3), random_ids(6, seed=4)
    for half in range(2):
        histories = [system for _ in range(width * 3 // 2)]
        for turn in range(4):
            seed = 9000 + 1000 * half + 100 * turn
            turns = [h + random_ids(40, seed=seed + i) for i, h in enumerate(histories)]
            done = ask([t + marker for t in turns])
            histories = [t + c.token_ids[4:] for t, c in zip(turns, done, strict=True)]


def wide_tree(ask: Ask, width: int) -> None:
    """Build a tree of 16 x 4 x 3 questions, all of a level at once; every branch goes on from its own answer."""
    frontier = [random_ids(256, seed=1)]
    for level, fan_out in enumerate((2 * width, 4, 3)):
        grown = [
            prompt + random_ids(24, seed=20_000 + 1000 * level + 10 * i + branch)
            for i, prompt in enumerate(frontier)
            for branch in range(fan_out)
        ]
        frontier = [prompt + c.token_ids for prompt, c in zip(grown, ask(grown), strict=True)]


WORKLOADS = {"tree": tree, "chat": chat, "few-shot": few_shot}
OF_HYBRIDS = {**WORKLOADS, "chat without thoughts": dropped_thoughts, "tree of 16 x 4 x 3": wide_tree}


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


@gl.program
def forking(s: gl.ProgramState, number: int) -> list[list[str]]:
    """Ask four branches of one prompt, then three branches of each branch. -> texts of the branches, then the leaves"""
    s += "Rules of the house. " * 8 + f"Task {number}: " + "plan, check, write. " * 3
    branches, leaves = s.fork(4), []
    for way, branch in enumerate(branches):
        branch += f"Way {way} through the task: " + gl.gen("way", regex="[a-z]{8}", max_tokens=8)
    for branch in branches:
        leaves += branch.fork(3)
        for check, leaf in enumerate(leaves[-3:]):
            leaf += f" Check {check} of this way: " + gl.gen("check", regex="[a-z]{8}", max_tokens=8)
    return [[one.text for one in level] for level in (branches, leaves)]


def forks_of_programs(engine: Runtime, width: int) -> tuple[int, int]:
    """Return cached prompt tokens of `width` programs run at once, of the engine and of the ideal."""
    engine.clear_cache()
    engine.reset_stats()
    ideal = Ideal()
    for levels in [s.result for s in forking.batch([{"number": i} for i in range(width)], runtime=engine)]:
        for text in (text for level in levels for text in level):
            ids = engine.tokenizer.encode(text)  # its answer is the last 8 letters, a token each
            ideal.see(ids[:-8], ids[-8:])
    return engine.stats().cached_tokens, ideal.num_cached


# The second pool is smaller than what the chats need at once: what an infinite cache finds is then out of reach.
POOLS = {8192: 0.96, 4096: None}
HYBRID_FLOOR = 0.95
STATES = 256
"""States of the hybrid: as many as its checkpoints need."""


def run(options: Options) -> Sequence[Row]:
    rows = []
    width = options.choose(4, 8)
    for pool, floor in POOLS.items():
        with runtime("tiny", cache=CacheConfig(max_tokens=pool), max_batch=16) as engine:
            for name, workload in WORKLOADS.items():
                ours, best = measure(engine, workload, width)
                what = f"{name}, batch 16, pool of {pool:,}"
                rows.append(Row("hits", what, ours, "tokens", best, ratio=ours / best, floor=floor))
    cache = CacheConfig(max_tokens=65_536, states=STATES)
    with runtime("tiny", kind="qwen3_next", cache=cache, max_batch=16) as engine:
        for name, workload in OF_HYBRIDS.items():
            ours, best = measure(engine, workload, width)
            floor = (
                None if workload is few_shot else HYBRID_FLOOR
            )  # who comes second computes what nobody knew is shared
            rows.append(Row("hits", f"hybrid: {name}", ours, "tokens", best, ratio=ours / best, floor=floor))
        ours, best = forks_of_programs(engine, width)
        what = "hybrid: programs of 4 branches with 3 each"
        rows.append(Row("hits", what, ours, "tokens", best, ratio=ours / best, floor=HYBRID_FLOOR))
    return rows
