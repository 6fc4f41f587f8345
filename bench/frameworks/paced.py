"""256 requests by each way, on an engine whose steps take as long as a GPU's: of the time of the same prompts as ids.

A system prompt of about 840 words that all share, 15 words of their own, 16 new tokens each; as cold texts 350 words
that nothing is shared of; as chats a quarter as many, four turns long. The baseline submits the same requests at
once, as token ids. Behind a way with threads stands what it cannot go below: the same ids from as many threads, which
is the device's time with so few requests at a time; and the baseline with the CPU time of the framework's own class on
an engine that answers at once, which is the floor where it is more than the ratio that is wanted. The device is a clock
(`_paced.py`): these are not a card's figures, but show what callers cost an engine between its steps, without a card.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.frameworks._instant import cpu_ms
from bench.frameworks._paced import paced_runtime
from bench.frameworks._ways import WAYS, Work
from bench.frameworks.instant import STOCK, WORDS
from bench.gpu.handed_over import TURNS, chats, compared, ids_from_threads
from bench.gpu.workloads import Figures
from bench.harness import Options, Row

FLOORS = {
    "text": 1.08, "messages": 1.08, "langchain-batch": 1.15, "langchain-abatch": 1.15, "langchain-chain": 1.2,
    "langchain-threads": 1.3, "dspy": 1.3, "llama-index": 1.3, "cold": 1.1, "chats": 1.1,
}  # fmt: skip
THREADED = {"langchain-threads": 64, "dspy": 64, "guidance": 16}


def run(options: Options) -> Sequence[Row]:
    pick = random.Random(0)
    count = options.choose(64, 256)
    questions = [" ".join(pick.choices(WORDS, k=15)) for _ in range(count)]
    work = Work(" ".join(pick.choices(WORDS, k=840)), questions, 16)
    rows = []
    with paced_runtime(options.model or "sprout") as (runtime, _):
        runtime.load()
        for name, way in WAYS.items():
            found = compared(runtime, way(runtime, work))
            alone_s = cpu_ms(STOCK[name](work), count) * count / 1e3 if name in STOCK else 0.0
            rows.append(_row(name, found, 1 + alone_s / found["ids_s"]))
            if name in THREADED:
                threads_s = ids_from_threads(runtime, way(runtime, work), THREADED[name])
                rows.append(_beside(name, "its ids from threads", found, threads_s))
                if name in STOCK:
                    rows.append(_beside(name, "ids, framework alone", found, found["ids_s"] + alone_s))
        cold = Work("", [" ".join(pick.choices(WORDS, k=350)) for _ in range(count)], 16)
        rows.append(_row("cold", compared(runtime, WAYS["text"](runtime, cold))))
        few = Work(" ".join(pick.choices(WORDS, k=64)), questions[: count // 4], 16)
        rows.append(_row("chats", compared(runtime, chats(runtime, few, TURNS), TURNS)))
    return rows


def _row(name: str, found: Figures, least: float = 0.0) -> Row:
    """least  the ratio of what the framework itself takes: no way through it can do with less"""
    wanted = max(FLOORS[name], least) if name in FLOORS else None
    return Row("paced", name, found["total_s"], "s", found["ids_s"], found["of_ids"], wanted, at_most=True)


def _beside(name: str, what: str, found: Figures, total_s: float) -> Row:
    return _row(f"{name}: {what}", {**found, "total_s": total_s, "of_ids": total_s / found["ids_s"]})
