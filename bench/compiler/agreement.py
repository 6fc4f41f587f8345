"""Answers under `reorder="parts"` on sprout's tasks whose parts are independent: equal and right ones, hit rates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import graftlm as gl
from bench.harness import Options, Row
from bench.workloads import _world as world, few_shot_choice, retrieval

SAMPLE = 8
"""Inputs that the order is learned from."""


@gl.program(temperature=0)
def passages(s: Any, passages: list[str], question: str) -> None:
    """Answer from retrieved passages, the most similar one first."""
    s += gl.system("Answer the question using only the given text.")
    with s.user():
        for passage in passages:
            s += gl.part(f"{passage}\n")
        s += f"\n{question}"
    s += gl.assistant(gl.gen("answer", max_tokens=16))


@gl.program(temperature=0)
def examples(s: Any, head: str, examples: list[str], question: str) -> None:
    """Choose a letter after solved questions, which are sampled anew for each input."""
    s += head
    for example in examples:
        s += gl.part(example)
    s += question + gl.gen("answer", max_tokens=2)


@gl.program(temperature=0)
def person(s: Any, passage: str, rules: str, question: str) -> None:
    """Answer about a passage that comes before the rules."""
    with s.user():
        s += gl.part(f"{passage}\n\n") + gl.part(f"{rules}\n\n")
        s += question
    s += gl.assistant(gl.gen("answer", max_tokens=16))


def retrieved(count: int) -> list[dict[str, Any]]:
    """Return questions on the passages of one library, three for each, ranked by the words of the question."""
    rng, found = random.Random(21), list[dict[str, Any]]()
    made = world.worlds(210, max(3, count // 12), num_entities=3)
    for one in made:
        library = [text for entity in one.entities if (text := " ".join(one.passage(plain=True).about(entity)))]
        for fact in world.facts(one, 12):
            asked = world.question(fact, rng)
            ranked = retrieval._search(library, asked)
            if any(fact.answer in text for text in ranked):
                found.append({"passages": ranked, "question": asked, "answer": fact.answer})
    rng.shuffle(found)
    return found[:count]


def solved(count: int) -> list[dict[str, Any]]:
    """Return multiple choice after four of eight solved questions, in a random order."""
    rng = random.Random(22)
    blocks = [few_shot_choice._block(one, world.facts(one, 1)[0], rng) for one in world.worlds(220, 8 + count)]
    shots = [f"{text} {letter}\n\n" for text, letter in blocks[:8]]
    head = "The following are multiple choice questions (with answers) about people.\n\n"
    return [
        {"head": head, "examples": rng.sample(shots, 4), "question": text, "answer": f" {letter}"}
        for text, letter in blocks[8:]
    ]


def described(count: int) -> list[dict[str, Any]]:
    """Return questions on one passage each; the rules are the same for all."""
    rng = random.Random(23)
    rules = "Answer the question using only the given text. Answer in a few words."
    found = []
    for one in world.worlds(230, count, num_entities=2):
        fact = world.facts(one, 1)[0]
        text = one.passage(plain=True).text
        found.append({"passage": text, "rules": rules, "question": world.question(fact, rng), "answer": fact.answer})
    return found


TASKS = (
    ("retrieved passages", passages, retrieved),
    ("solved examples", examples, solved),
    ("passage before rules", person, described),
)


def run(options: Options) -> Iterator[Row]:
    count, equal_in_all, asked_in_all = options.choose(24, 200), 0, 0
    with gl.Runtime("sprout") as runtime:
        for name, program, make in TASKS:
            items = make(count)
            answers = [item.pop("answer") for item in items]
            with redirect_stdout(None):
                compiled = program.compile(items[:SAMPLE], reorder="parts", runtime=runtime)
            said, rates = [], []
            for one in (program, compiled):
                runtime.clear_cache()
                runtime.reset_stats()
                said.append([one.run(**item, runtime=runtime)["answer"].strip() for item in items])
                rates.append(runtime.stats().hit_rate * 100)
            equal = sum(a == b for a, b in zip(*said, strict=True))
            equal_in_all, asked_in_all = equal_in_all + equal, asked_in_all + len(items)
            before, after = ([a == b.strip() for a, b in zip(one, answers, strict=True)] for one in said)
            share = 100 / len(items)
            yield Row("agreement", f"{name}: equal answers of {len(items)}", equal * share, "%")
            yield Row("agreement", f"{name}: right answers", sum(after) * share, "%", sum(before) * share)
            yield Row("agreement", f"{name}: hit rate", rates[1], "%", rates[0])
    yield Row("agreement", f"equal answers of {asked_in_all}", 100 * equal_in_all / asked_in_all, "%", floor=95)
