"""Inputs of the workloads: passages of sprout's world and questions with right answers, equal for equal seeds."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from typing import Any

from bench.demo_inputs import plain_facts
from bench.sprout.attribute import spoken
from bench.sprout.names import Names
from bench.sprout.world import Fact, World, make_world
from graftlm.plugins import manager
from graftlm.plugins.hookspecs import Register, hookimpl

SHARE = float(os.environ.get("GRAFTLM_BENCH_SHARE", "1"))
"""The share of a workload's full size; `python -m bench workloads --quick` makes it smaller."""


@hookimpl
def graftlm_register_engines(register: Register) -> None:
    """Offer engines in this process to programs, in place of servers of these names.

    llama.cpp has no tokenizer like sprout's: it takes the token ids of programs.
    """
    register("hf-batching", "bench.workloads._batching:build_batching")
    if importlib.util.find_spec("llama_cpp") is not None:
        register("llama-cpp", "bench.workloads._llama_cpp:build_llama_cpp")


if "hf-batching" not in manager.load().engines:
    manager.load().add("bench-workloads", sys.modules[__name__])


def count(full: int, least: int = 2) -> int:
    """Return the number of `full` items that this run takes."""
    return max(least, round(full * SHARE))


def worlds(seed: int, number: int, *, num_entities: int = 4, **options: Any) -> list[World]:
    """Build worlds of several people, in plain ASCII."""
    rng = random.Random(seed)
    found: list[World] = []
    while len(found) < number:
        world = make_world(rng, "test", kind="person", num_entities=num_entities, **options)
        texts = [entity.name for entity in world.entities] + [fact.answer for fact in world.facts]
        if all(text.isascii() for text in texts) and len(plain_facts(world)) >= 4:
            found.append(world)
    return found


def facts(world: World, number: int) -> list[Fact]:
    """Return a sample of facts with one short answer."""
    plain = plain_facts(world)
    return world.rng.sample(plain, min(number, len(plain)))


def question(fact: Fact, rng: random.Random) -> str:
    return fact.attribute.question(rng, fact.subject.name)


def options(fact: Fact, rng: random.Random, number: int = 4) -> list[str]:
    """Return the right answer among others of its kind, in a random order."""
    names, found = Names(rng, "test"), {fact.answer}
    for _ in range(100):  # a small class may have fewer values
        if len(found) < number:
            found.add(spoken(fact.attribute.draw(names)))
    order = sorted(found)
    rng.shuffle(order)
    return order
