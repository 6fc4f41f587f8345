"""256 requests by each way, on an engine whose steps take as long as a GPU's: of the time of the same prompts as ids.

A system prompt of about 840 words that all share, 15 words of their own, 16 new tokens each. The baseline submits the
same requests at once, as token ids. The device is a clock (`_paced.py`): these are not a card's figures, but show what
callers cost an engine between its steps, without a card.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.frameworks._paced import paced_runtime
from bench.frameworks._ways import WAYS, Work
from bench.frameworks.instant import WORDS
from bench.gpu.handed_over import compared
from bench.harness import Options, Row

FLOORS = {
    "text": 1.08, "messages": 1.08, "langchain-batch": 1.15, "langchain-abatch": 1.15, "langchain-chain": 1.2,
    "langchain-threads": 1.3, "dspy": 1.3, "llama-index": 1.3,
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
            found = compared(runtime, way(runtime, work))
            seconds, as_ids, ratio = found["total_s"], found["ids_s"], found["of_ids"]
            floor = FLOORS.get(name)
            rows.append(Row("paced", name, seconds, "s", as_ids, ratio, floor, at_most=True))
    return rows
