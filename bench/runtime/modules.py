"""Prompt modules beside the same text computed as a whole: right answers of the embedded model, and computed tokens.

Facts of made-up people and things that the model has never seen, in passages with one subject each; every passage is a
module. A question about one fact follows, or the question which of the numbered passages answers it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import graftlm as gl
from bench.harness import Options, Row
from bench.sprout.maker import Maker
from bench.sprout.wires import Wires

Case = tuple[str, list[str], str, str]
"""The text before the modules, theirs, the question after them, and its answer."""


def run(options: Options) -> Sequence[Row]:
    count = options.count or options.choose(40, 300)
    wires = Wires.load()
    rows: list[Row] = []
    with gl.Runtime("sprout", device="cpu", seed=0, quiet=True) as runtime:
        for task, passages in (("fact", 1), ("fact", 2), ("fact", 4), ("fact", 8), ("which", 4), ("which", 8)):
            make = Maker(random.Random(f"{task} {passages}"), "test", wires)
            found = [_case(make, task, passages) for _ in range(count)]
            rows += _rows(runtime, f"{task} in {passages} passage{'s' * (passages > 1)}", found)
    return rows


def _case(make: Maker, task: str, passages: int) -> Case:
    world = make.world(num_entities=passages, num_facts=4)
    texts = [world.passage(list(entity.facts.values()), plain=True).text for entity in world.entities]
    question, answer, fact, _ = make.question(world, unknown=0.0)
    assert fact is not None
    if task == "fact":
        return "", [f"{text}\n\n" for text in texts], question, answer
    (message,) = make.wires.messages("li_rerank", context="<context>", query=question)
    before, after = message["content"].split("<context>")
    numbered = [f"Document {i + 1}:\n{text}\n\n" for i, text in enumerate(texts)]
    return before, numbered, after.lstrip("\n"), f"Doc: {world.entities.index(fact.subject) + 1}, Relevance: 10"


@gl.program(temperature=0, max_tokens=48)
def _ask(s: Any, before: str, texts: list[str], question: str, modules: bool) -> None:
    with s.user():
        s += before
        for number, text in enumerate(texts):
            s += gl.module(f"passage {number}", text) if modules else text
        s += question
    s += gl.assistant(gl.gen("answer"))


def _rows(runtime: gl.Runtime, name: str, found: Sequence[Case]) -> list[Row]:
    right: dict[str, int] = {}
    computed: dict[str, int] = {}
    for way, modules, turned in (("whole", False, False), ("turned", False, True), ("modules", True, False)):
        runtime.clear_cache()
        runtime.reset_stats()
        items: list[dict[str, Any]] = [
            {"before": before, "texts": texts[::-1] if turned else texts, "question": question, "modules": modules}
            for before, texts, question, _ in found
        ]
        states = _ask.batch(items, runtime=runtime)
        right[way] = sum(state["answer"].strip() == answer for state, (*_, answer) in zip(states, found, strict=True))
        computed[way] = runtime.stats().computed_tokens
        if modules:
            runtime.reset_stats()
            again = [{**one, "texts": one["texts"][::-1]} for one in items]
            same = sum(
                one["answer"] == other["answer"]
                for one, other in zip(_ask.batch(again, runtime=runtime), states, strict=True)
            )
            computed["again"] = runtime.stats().computed_tokens
    shape = {"right": right, "computed": computed, "equal in the other order": same}
    total = len(found)
    return [
        Row("modules", f"{name}: right with modules, baseline the whole", right["modules"], f"of {total}",
            right["whole"], right["modules"] / max(right["whole"], 1), shape=shape),
        Row("modules", f"{name}: right with the whole text in the other order", right["turned"], f"of {total}",
            right["whole"], right["turned"] / max(right["whole"], 1)),
        Row("modules", f"{name}: answers of modules that are the same in the other order", same, f"of {total}"),
        Row("modules", f"{name}: tokens computed for the other order, baseline the whole", computed["again"], "tokens",
            computed["whole"], computed["again"] / computed["whole"]),
    ]  # fmt: skip
