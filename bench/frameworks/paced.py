"""256 requests by each way, on an engine whose steps take as long as a GPU's: of the time of the same prompts as ids.

A system prompt of about 840 words that all share, 15 words of their own, 16 new tokens each; as cold texts 350 words
that nothing is shared of; as chats a quarter as many, four turns long. The baseline submits the same requests at
once, as token ids. The device is a clock (`_paced.py`): these are not a card's figures, but show what
callers cost an engine between its steps, without a card.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.frameworks._paced import paced_runtime
from bench.frameworks._ways import WAYS, Work
from bench.frameworks.instant import WORDS
from bench.gpu.handed_over import TURNS, chats, compared
from bench.gpu.workloads import Figures
from bench.harness import Options, Row

FLOORS = {
    "text": 1.08, "messages": 1.08, "langchain-batch": 1.15, "langchain-abatch": 1.15, "langchain-chain": 1.2,
    "langchain-threads": 1.3, "dspy": 1.3, "llama-index": 1.3, "cold": 1.1, "chats": 1.1,
}  # fmt: skip


def run(options: Options) -> Sequence[Row]:
    pick = random.Random(0)
    count = options.choose(64, 256)
    questions = [" ".join(pick.choices(WORDS, k=15)) for _ in range(count)]
    work = Work(" ".join(pick.choices(WORDS, k=840)), questions, 16)
    rows = []
    with paced_runtime(options.model or "sprout") as (runtime, _):
        runtime.load()
        for name, way in WAYS.items():
            if name == "guidance":  # its engine samples by itself, on the host
                continue
            rows.append(_row(name, compared(runtime, way(runtime, work))))
        cold = Work("", [" ".join(pick.choices(WORDS, k=350)) for _ in range(count)], 16)
        rows.append(_row("cold", compared(runtime, WAYS["text"](runtime, cold))))
        few = Work(" ".join(pick.choices(WORDS, k=64)), questions[: count // 4], 16)
        rows.append(_row("chats", compared(runtime, chats(runtime, few, TURNS), TURNS)))
    return rows


def _row(name: str, found: Figures) -> Row:
    return Row("paced", name, found["total_s"], "s", found["ids_s"], found["of_ids"], FLOORS.get(name), at_most=True)
