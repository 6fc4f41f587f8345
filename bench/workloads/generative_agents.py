"""Generative agents: calls of five templates, one after another, as a simulation makes them for each event."""

import random

import graftlm as gl
from bench.workloads import _world as world

HEADER = "".join(
    f"{made.passage(plain=True).text}\nWhere: the {fact.attribute.label} of {fact.subject.name} is {fact.answer}.\n\n"
    for made in world.worlds(39, 2)
    for fact in world.facts(made, 1)
)
TEMPLATES = (
    ("poignancy", "On a scale from 1 to 10, how moving is this for {name}?\n{event}\nRating:", 2, "\n"),
    ("triple", "Write the event as (subject, verb, object).\n{event}\nTriple: ({name},", 20, ")"),
    ("mood", "In one word, the mood of {name} after this:\n{event}\nMood:", 6, "\n"),
    ("place", HEADER + "{event}\nWhere: the {label} of {name} is", 10, "."),
    ("thing", "{event}\nThe most important thing for {name} is the", 5, "."),
)
max_tokens = 20


def inputs():
    rng, found = random.Random(4), []
    for made in world.worlds(40, world.count(8)):
        fact = world.facts(made, 1)[0]
        rng.random()
        found.append({"event": made.passage(plain=True).text, "name": fact.subject.name, "label": fact.attribute.label,
                      "answer": fact.answer})  # fmt: skip
    return found


def warm_up():
    return [{"event": "Ada Holt works as a baker.", "name": "Ada Holt", "label": "job", "answer": "baker"}]


def _prompts(item):
    return {name: template.format(**item) for name, template, _, _ in TEMPLATES}


@gl.program(temperature=0)
def _call(s, prompt, limit, stop):
    s += prompt + gl.gen("text", max_tokens=limit, stop=stop)


def run_native(llm, inputs):
    answers = []
    for item in inputs:
        prompts = _prompts(item)
        calls = {name: (prompts[name], limit, stop) for name, _, limit, stop in TEMPLATES}
        answers.append({name: _call.run(*call, runtime=llm)["text"].strip() for name, call in calls.items()})
    return answers


def run_langchain(llm, inputs):
    answers = []
    for item in inputs:
        prompts = _prompts(item)
        answers.append({name: llm.invoke(prompts[name], stop=[stop]).content.strip() for name, _, _, stop in TEMPLATES})
    return answers


def run_guidance(llm, inputs):
    from guidance import gen

    answers = []
    for item in inputs:
        prompts = _prompts(item)
        answers.append({name: (llm + prompts[name] + gen("text", max_tokens=limit, stop=stop))["text"].strip()
                        for name, _, limit, stop in TEMPLATES})  # fmt: skip
    return answers


def right(item, answer):
    return answer["place"].rstrip(".") == item["answer"]
