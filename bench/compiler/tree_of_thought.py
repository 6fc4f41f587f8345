"""Tree of thought in a quarter of the KV that it needs breadth first: computed tokens beside an endless pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import graftlm as gl
from bench.harness import Options, Row
from bench.models import runtime
from graftlm import CacheConfig, Stats

LEVELS, WIDTH = 4, 3
QUESTION = "Mara is a baker and gets up early. Tom sells fish at the harbour. Ida flies planes. Who gets up early?"


@gl.program(temperature=0, ignore_eos=True)
def think(s: Any, question: str, levels: int) -> list[str]:
    s += question
    states = [s]
    for level in range(levels):
        states = [branch for state in states for branch in state.fork(WIDTH)]
        for i, branch in enumerate(states):
            branch += f"\nThought {level}.{i % WIDTH}, what follows?" + gl.gen("thought", max_tokens=16)
    return [state["thought"] for state in states]


def measure(item: dict[str, Any], pool: int | None, *, planned: bool) -> tuple[list[str], Stats, int]:
    """Return the answers of one run, the engine's counters, and the tokens needed breadth first."""
    cache = CacheConfig(max_tokens=pool) if pool is not None else CacheConfig()
    with runtime("tiny", cache=cache) as engine:
        plan = think.plan([item], runtime=engine)
        answers = (plan.program if planned else think).run(**item, runtime=engine).result
        return answers, engine.stats(), plan.breadth_first.peak_tokens


def run(options: Options) -> Iterator[Row]:
    item = {"question": QUESTION, "levels": options.choose(3, LEVELS)}
    expected, endless, needed = measure(item, None, planned=False)
    shape = {"levels": item["levels"], "width": WIDTH, "pool": needed // 4, "breadth_first": needed}
    for name, planned in (("breadth first, as without a plan", False), ("planned, depth first", True)):
        answers, stats, _ = measure(item, needed // 4, planned=planned)
        ratio = stats.computed_tokens / endless.computed_tokens
        yield Row("tree_of_thought", f"{name}: computed prompt tokens in a quarter of the pool", stats.computed_tokens,
                  "tokens", endless.computed_tokens, ratio=ratio, floor=1.02 if planned else None, at_most=True,
                  shape=shape)  # fmt: skip
        equal = sum(a == b for a, b in zip(answers, expected, strict=True))
        yield Row("tree_of_thought", f"{name}: equal answers", equal, f"of {len(expected)}", floor=len(expected))
        yield Row("tree_of_thought", f"{name}: steps", stats.steps, "steps", endless.steps, shape=shape)
