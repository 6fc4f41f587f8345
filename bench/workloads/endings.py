"""Choosing an ending (HellaSwag): solved examples that never change, then one of four endings by likelihood.

Twenty examples; eight where less than half of the workload is run.
"""

import random

import graftlm as gl
from bench.workloads import _world as world


def _case(made, rng):
    fact = world.facts(made, 1)[0]
    head = f"{made.passage([fact, *world.facts(made, 3)]).text}\nThe {fact.attribute.label} of {fact.subject.name} is"
    return {"context": head, "endings": [f" {one}." for one in world.options(fact, rng)], "answer": f" {fact.answer}."}


def _cases():
    rng = random.Random(2)
    return [_case(made, rng) for made in world.worlds(20, 20 + 24, num_entities=2)]


NUM_SHOTS = 20 if world.SHARE >= 0.5 else 8
SHOTS = "".join(case["context"] + case["answer"] + "\n\n" for case in _cases()[:NUM_SHOTS])


def inputs():
    return _cases()[20 : 20 + world.count(12, 3)]


def warm_up():
    return [{"context": "The job of Ada Holt is", "endings": [" baker.", " smith."], "answer": " baker."}]


@gl.program
def _end(s, context, endings):
    s += SHOTS + context + gl.select("ending", endings)


def run_native(llm, inputs):
    states = _end.batch([{key: one[key] for key in ("context", "endings")} for one in inputs], runtime=llm)
    return [state["ending"] for state in states]


def run_guidance(llm, inputs):
    from guidance import select

    base = llm + SHOTS
    return [(base + one["context"] + select(one["endings"], name="ending"))["ending"] for one in inputs]


def right(item, answer):
    return answer == item["answer"]
