"""Forms to fill in from a passage, behind three examples: JSON in a text, and the turns of DSPy's adapters."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import dspy

import graftlm as gl
from bench.sprout.attributes import BY_KIND
from bench.sprout.world import make_world
from graftlm.core.program.state import ProgramState

THREE = ("age", "city", "job")
EIGHT = (*THREE, "favorite color", "favorite drink", "hobby", "field of study", "pet")


@dataclass(frozen=True)
class Form:
    """The input of a program.

    turns  before the answer, as messages;  text: the same as plain text, for a form without turns.
    parts  given text and the next field's name and stop, in turn; the last has no field.
    """

    turns: tuple[dict[str, str], ...]
    text: str
    parts: tuple[tuple[str, str | None, str], ...]


@gl.program(temperature=0)
def fill(s: ProgramState, form: Form) -> None:
    """Fill in a form."""
    if not form.turns:
        s += form.text
        return answer(s, form)
    for turn in form.turns:
        with {"system": s.system, "user": s.user, "assistant": s.assistant}[turn["role"]]():
            s += turn["content"]
    with s.assistant():
        answer(s, form)


def answer(s: ProgramState, form: Form) -> None:
    for given, field, stop in form.parts:
        s += given
        if field is not None:
            s += gl.gen(field, max_tokens=16, stop=stop)


def cases(labels: tuple[str, ...], seed: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the fields' names, and four people: a passage, a name and the right values."""
    rng = random.Random(seed)
    attributes = [next(a for a in BY_KIND["person"] if a.label == label) for label in labels]
    people = []
    for _ in range(4):
        world = make_world(rng, "test", num_entities=1, kind="person", attributes=attributes, num_facts=len(labels))
        person = world.entities[0]
        values = {a.fields[0]: person.facts[a.key].answer for a in attributes}
        people.append({"text": world.passage().text, "name": person.name} | values)
    return [a.fields[0] for a in attributes], people


def json_form(labels: tuple[str, ...], seed: int) -> Form:
    """Return one JSON object of text values after the age."""
    keys, people = cases(labels, seed)
    gaps = ['{"age":', *(("," if i == 0 else '",') + f'"{key}":"' for i, key in enumerate(keys[1:])), '"}']
    heads = [f"{p['text']}\n\n{p['name']} as JSON: " for p in people]
    shown = ["".join(gap + p[key] for gap, key in zip(gaps, keys, strict=False)) + gaps[-1] for p in people[:3]]
    text = "".join(f"{head}{body}\n\n" for head, body in zip(heads, shown, strict=False)) + heads[3]
    return Form((), text, tuple(zip(gaps, [*keys, None], _json_stops(keys), strict=True)))


def json_turns(labels: tuple[str, ...], seed: int) -> Form:
    """Return the turns of DSPy's JSONAdapter, and its JSON of a pair a line."""
    keys, people = cases(labels, seed)
    gaps = ['{\n  "age": ', *(("," if i == 0 else '",') + f'\n  "{key}": "' for i, key in enumerate(keys[1:])), '"\n}']
    turns = _turns(dspy.JSONAdapter(), keys, [{**person, "age": int(person["age"])} for person in people])
    return Form(turns, "", tuple(zip(gaps, [*keys, None], _json_stops(keys), strict=True)))


def chat_form(labels: tuple[str, ...], seed: int) -> Form:
    """Return the turns and markers of DSPy's ChatAdapter."""
    keys, people = cases(labels, seed)
    gaps = [("" if i == 0 else "\n\n") + f"[[ ## {key} ## ]]\n" for i, key in enumerate([*keys, "completed"])]
    stops = ["\n\n"] * len(keys) + [""]
    return Form(_turns(dspy.ChatAdapter(), keys, people), "", tuple(zip(gaps, [*keys, None], stops, strict=True)))


def _turns(adapter: dspy.Adapter, keys: list[str], people: list[dict[str, Any]]) -> tuple[dict[str, str], ...]:
    """Three people as examples, and the fourth to ask about."""
    given = {name: (str, dspy.InputField()) for name in ("text", "name")}
    wanted = {key: (type(people[0][key]), dspy.OutputField()) for key in keys}
    signature = dspy.Signature(given | wanted, "Extract the fields from the text.")
    return tuple(adapter.format(signature, people[:3], {name: people[3][name] for name in given}))


def _json_stops(keys: list[str]) -> list[str]:
    """Return the stops of the parts: a number's comma, a text's quote, none after the last."""
    return [",", *['"'] * (len(keys) - 1), ""]
