"""What the workloads are about: passages of sprout's world and questions with right answers, equal for equal seeds."""

from __future__ import annotations

import os
import random
from typing import Any

from bench.demo_inputs import plain_facts
from bench.sprout.attribute import spoken
from bench.sprout.names import Names
from bench.sprout.world import Fact, World, make_world

SHARE = float(os.environ.get("GRAFTLM_BENCH_SHARE", "1"))
"""The share of a workload's full size; `python -m bench workloads --quick` makes it smaller."""


def count(full: int, least: int = 2) -> int:
    """How many of `full` things this run takes."""
    return max(least, round(full * SHARE))


def worlds(seed: int, number: int, *, num_entities: int = 4, **options: Any) -> list[World]:
    """Worlds of several people, in plain ASCII."""
    rng = random.Random(seed)
    found: list[World] = []
    while len(found) < number:
        world = make_world(rng, "test", kind="person", num_entities=num_entities, **options)
        texts = [entity.name for entity in world.entities] + [fact.answer for fact in world.facts]
        if all(text.isascii() for text in texts) and len(plain_facts(world)) >= 4:
            found.append(world)
    return found


def facts(world: World, number: int) -> list[Fact]:
    """Some facts with one short answer."""
    plain = plain_facts(world)
    return world.rng.sample(plain, min(number, len(plain)))


def question(fact: Fact, rng: random.Random) -> str:
    return fact.attribute.question(rng, fact.subject.name)


def options(fact: Fact, rng: random.Random, number: int = 4) -> list[str]:
    """The right answer among others of its kind, in a random order."""
    names, found = Names(rng, "test"), {fact.answer}
    for _ in range(100):  # a small class may have fewer values
        if len(found) < number:
            found.add(spoken(fact.attribute.draw(names)))
    order = sorted(found)
    rng.shuffle(order)
    return order
