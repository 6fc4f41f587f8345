"""python -m bench.demo_inputs: write graftlm/demo/inputs.json, the questions of `graftlm demo`.

Passages of the micro-world about names that the embedded model never saw in training; several questions about each,
in any order, as they come to a service.
"""

from __future__ import annotations

import json
import random
from typing import Any

from bench.harness import ROOT
from bench.sprout.attributes import BY_KIND
from bench.sprout.world import Entity, Fact, World, make_world

PATH = ROOT / "graftlm/demo/inputs.json"
NUM_WORLDS, NUM_QUESTIONS, NUM_SHOTS = 6, 4, 4


def worlds(rng: random.Random, **options: Any) -> list[World]:
    """Build worlds of several people, in plain ASCII, so that the demo is readable everywhere."""
    found: list[World] = []
    while len(found) < NUM_WORLDS:
        world = make_world(rng, "test", kind="person", **options)
        texts = [entity.name for entity in world.entities] + [fact.answer for fact in world.facts]
        if all(text.isascii() for text in texts) and len(plain_facts(world)) >= NUM_QUESTIONS:
            found.append(world)
    return found


def plain_facts(world: World) -> list[Fact]:
    """Return the facts with one short answer."""
    return [fact for fact in world.facts if fact.attribute.type in ("str", "int")]


def questions(rng: random.Random) -> list[dict[str, Any]]:
    """Passage, question, answer: each passage comes with several questions, the order is mixed."""
    items = []
    for world in worlds(rng, num_entities=4):
        passage = world.passage().text
        for fact in rng.sample(plain_facts(world), NUM_QUESTIONS):
            question = fact.attribute.question(rng, fact.subject.name)
            items.append({"passage": passage, "question": question, "answer": fact.answer})
    rng.shuffle(items)
    return items


def shots(rng: random.Random) -> dict[str, Any]:
    """Return one attribute to find, examples that show it, and texts to find it in."""
    attribute = next(a for a in BY_KIND["person"] if a.label == "job")
    items = [
        {"passage": passage.text, "name": entity.name, "answer": entity.facts[attribute.key].answer}
        for world in worlds(rng, num_entities=4, attributes=[attribute], num_facts=3)
        for passage in [world.passage()]
        for entity in world.entities
    ]
    rng.shuffle(items)
    return {"attribute": attribute.label, "examples": items[:NUM_SHOTS], "items": items[NUM_SHOTS:]}


def forms(rng: random.Random) -> list[dict[str, Any]]:
    """Return a passage, somebody in it, and the lines of a form about them."""

    def lines(entity: Entity) -> dict[str, str]:
        facts = [fact for fact in entity.facts.values() if fact.attribute.type in ("str", "int")]
        return {fact.attribute.label.capitalize(): fact.answer for fact in facts[:3]}

    items = [
        {"passage": passage.text, "name": entity.name, "answer": lines(entity)}
        for world in worlds(rng, num_entities=4)
        for passage in [world.passage()]
        for entity in world.entities
        if lines(entity)
    ]
    rng.shuffle(items)
    return items


def main() -> None:
    inputs = {
        "dspy": questions(random.Random(1)),
        "langchain": shots(random.Random(2)),
        "llama_index": questions(random.Random(3)),
        "guidance": forms(random.Random(4)),
    }
    PATH.write_text(json.dumps(inputs, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
