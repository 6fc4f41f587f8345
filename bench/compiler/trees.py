"""Tree and skeleton of thought in a quarter of the KV that they need breadth first: computed tokens, steps.

Beside the same programs without a plan in that pool, and in an endless one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import graftlm as gl
from bench.harness import Options, Row
from bench.models import runtime
from graftlm import CacheConfig, Stats
from graftlm.core.program.program import Program

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


@gl.program(temperature=0, ignore_eos=True)
def skeleton(s: Any, question: str, points: int) -> list[str]:
    """Write the points of an answer, then expand each in two steps in a branch of its own."""
    s += question + " The points of the answer are:"
    for i in range(points):
        s += f"\n{i + 1}. " + gl.gen(f"point {i}", max_tokens=8)
    branches = s.fork(points)
    for i, branch in enumerate(branches):
        branch += f"\nPoint {i + 1} in detail, its reasons first:" + gl.gen("reasons", max_tokens=24)
        branch += f"\nThen an example of point {i + 1}:" + gl.gen("example", max_tokens=24)
    return [str(branch["reasons"]) + str(branch["example"]) for branch in branches]


def measure(program: Program, item: dict[str, Any], pool: int | None, *, planned: bool) -> tuple[list[str], Stats, int]:
    """Return the answers of one run, the engine's counters, and the tokens needed breadth first."""
    cache = CacheConfig(max_tokens=pool) if pool is not None else CacheConfig()
    with runtime("tiny", cache=cache) as engine, redirect_stdout(None):
        plan = program.plan([item], runtime=engine)
        answers = (plan.program if planned else program).run(**item, runtime=engine).result
        return answers, engine.stats(), plan.breadth_first.peak_tokens


def run(options: Options) -> Iterator[Row]:
    tree = {"question": QUESTION, "levels": options.choose(3, LEVELS)}
    yield from _tree("tree of thought", think, tree)
    yield from _tree("skeleton of thought", skeleton, {"question": QUESTION, "points": options.choose(12, 24)})


def _tree(what: str, program: Program, item: dict[str, Any]) -> Iterator[Row]:
    expected, endless, needed = measure(program, item, None, planned=False)
    shape = {**item, "width": WIDTH, "pool": needed // 4, "breadth_first": needed}
    for name, planned in (("breadth first, as without a plan", False), ("planned, depth first", True)):
        answers, stats, _ = measure(program, item, needed // 4, planned=planned)
        ratio = stats.computed_tokens / endless.computed_tokens
        yield Row("trees", f"{what}, {name}: computed prompt tokens in a quarter of the pool", stats.computed_tokens,
                  "tokens", endless.computed_tokens, ratio=ratio, floor=1.02 if planned else None, at_most=True,
                  shape=shape)  # fmt: skip
        equal = sum(a == b for a, b in zip(answers, expected, strict=True))
        yield Row("trees", f"{what}, {name}: equal answers", equal, f"of {len(expected)}", floor=len(expected))
        yield Row("trees", f"{what}, {name}: steps", stats.steps, "steps", endless.steps, shape=shape)
