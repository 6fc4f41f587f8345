"""Skeleton of thought: points one after another; as each is there, a nested program expands it after three examples."""

import random

import graftlm as gl
from bench.workloads import _world as world


def _form(made, entity):
    lines = "\n".join(f"{fact.attribute.label.capitalize()}: {fact.answer}" for fact in _lines(entity))
    return f"{made.passage(plain=True).text}\n\n{entity.name}\n{lines}\n\n"


def _lines(entity):
    return [fact for fact in entity.facts.values() if fact.attribute.type in ("str", "int")][:2]


def _question(text, name, label):
    return f"{text}\n\nWhat is the {label.lower()} of {name}?"


EXAMPLES = [(made, made.entities[0]) for made in world.worlds(69, 3)]
SHOTS = "".join(_form(made, entity) for made, entity in EXAMPLES)
SHOT_CHAT = [
    turn
    for made, entity in EXAMPLES
    for fact in _lines(entity)[:1]
    for turn in (
        ("human", _question(made.passage(plain=True).text, entity.name, fact.attribute.label)),
        ("ai", str(fact.answer)),
    )
]
max_tokens = 24


def inputs():
    """Build texts about five people each."""
    random.seed(6)
    found = []
    for made in world.worlds(60, world.count(6), num_entities=5):
        answer = {e.name: [fact.answer for fact in _lines(e)] for e in made.entities if _lines(e)}
        labels = {e.name: [fact.attribute.label.capitalize() for fact in _lines(e)] for e in made.entities if _lines(e)}
        found.append({"text": made.passage(plain=True).text, "labels": labels, "answer": answer})
    return found


def warm_up():
    return [
        {"text": "The job of Ada Holt is baker.", "labels": {"Ada Holt": ["Job"]}, "answer": {"Ada Holt": ["baker"]}}
    ]


@gl.program(temperature=0)
def _expand(s, text, name, labels):
    s += SHOTS + f"{text}\n\n{name}\n"
    for i, label in enumerate(labels):
        s += f"{label}: " + gl.gen(f"value {i}", max_tokens=24, stop="\n") + "\n"


@gl.program(temperature=0)
def _skeleton(s, text, labels):
    s += gl.user(f"{text}\n\nWho is in the text?")
    points = []
    for number, (name, wanted) in enumerate(labels.items()):
        s += f"\n{number + 1}. " + gl.gen(f"point {number}", max_tokens=8, stop=["\n", ","])
        s[f"point {number}"]
        points.append((_expand.run(text, name, wanted), len(wanted)))
    s.set("values", [[point[f"value {i}"].strip() for i in range(number)] for point, number in points])


def run_native(llm, inputs):
    states = _skeleton.batch([{key: one[key] for key in ("text", "labels")} for one in inputs], runtime=llm)
    return [dict(zip(one["labels"], state["values"])) for one, state in zip(inputs, states)]


def run_langchain(llm, inputs):
    llm.bind(max_tokens=12).batch([f"{one['text']}\n\nWho is in the text?" for one in inputs])
    asked = [
        [*SHOT_CHAT, ("human", _question(one["text"], name, label))]
        for one in inputs
        for name, labels in one["labels"].items()
        for label in labels
    ]
    said = iter([answer.content.strip() for answer in llm.batch(asked)])
    return [{name: [next(said) for _ in labels] for name, labels in one["labels"].items()} for one in inputs]


def run_guidance(llm, inputs):
    from guidance import gen

    answers = []
    for one in inputs:
        values = {}
        for name, labels in one["labels"].items():
            lm = llm + SHOTS + f"{one['text']}\n\n{name}\n"
            for i, label in enumerate(labels):
                lm += f"{label}: " + gen(f"value_{i}", max_tokens=24, stop="\n") + "\n"
            values[name] = [lm[f"value_{i}"].strip() for i in range(len(labels))]
        answers.append(values)
    return answers


def right(item, answer):
    return answer == item["answer"]
