"""The sources of every task: randomness, the split's names, the frameworks' prompts."""

from __future__ import annotations

import random
from typing import Any

from bench.sprout.attribute import Attribute, Kind
from bench.sprout.attributes import BY_KIND
from bench.sprout.document import Message, Parts, compact
from bench.sprout.names import Names, Split
from bench.sprout.wires import Wires
from bench.sprout.world import Entity, Fact, Passage, World, make_world

UNKNOWN = "unknown"
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "Answer from the passage.",
    "Be brief.",
    "You answer questions about a short text.",
    "Answer with one word or number.",
    "You are a careful reader.",
    "Answer the question using only the given text.",
    "You are an expert in reading comprehension. Answer briefly.",
    "You help people to find facts in documents. If the text does not say it, answer unknown.",
    "You are a concise question answering system.",
)


class Maker:
    """Draws worlds, questions and wording for one stream of documents."""

    def __init__(self, rng: random.Random, split: Split, wires: Wires) -> None:
        self.rng = rng
        self.split = split
        self.wires = wires
        self.names = Names(rng, split)

    def world(self, **options: Any) -> World:
        return make_world(self.rng, self.split, **options)

    def kind(self) -> Kind:
        dice = self.rng.random()
        return "person" if dice < 0.66 else "place" if dice < 0.84 else "company"

    def attributes(self, kind: Kind, count: int) -> list[Attribute]:
        return self.rng.sample(BY_KIND[kind], min(count, len(BY_KIND[kind])))

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def system(self, probability: float = 0.5) -> list[Message]:
        """Return a system turn, or none."""
        return [{"role": "system", "content": self.rng.choice(SYSTEMS)}] if self.chance(probability) else []

    def question(self, world: World, unknown: float = 0.05) -> tuple[str, str, Fact | None, str]:
        """Ask for one fact of the world: (question, answer, fact, detail).

        With probability `unknown` the passage does not say it: fact is None, the answer UNKNOWN.
        """
        entity = self.rng.choice(world.entities)
        name = self.call(world, entity)
        missing = [a for a in entity.missing if a.type != "bool"]
        if missing and self.chance(unknown):
            attribute = self.rng.choice(missing)
            return attribute.question(self.rng, name), UNKNOWN, None, UNKNOWN
        fact = self.rng.choice(list(entity.facts.values()))
        return fact.attribute.question(self.rng, name), fact.answer, fact, fact.attribute.key

    def call(self, world: World, entity: Entity) -> str:
        """Return the entity's name; seldom a first name, where that is clear."""
        clear = sum(other.name.startswith(entity.short) for other in world.entities) == 1
        return entity.short if clear and self.chance(0.15) else entity.name

    def one_of(self, entity: Entity) -> Fact:
        return self.rng.choice(list(entity.facts.values()))

    def passage(self, world: World) -> Passage:
        return world.passage()


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def json_parts(obj: dict[str, Any], *, learn_keys: bool, spaced: bool = False) -> Parts:
    """Return a JSON object as the answer. With `learn_keys` all of it is the model's to write; else keys and
    punctuation that a schema forces are given and only values (and where they end) are learned.
    """
    colon, comma = (": ", ", ") if spaced else (":", ",")
    if learn_keys and not spaced:
        return compact(obj)
    parts: list[tuple[str, bool]] = []
    items = list(obj.items())
    for i, (key, value) in enumerate(items):
        last = i == len(items) - 1
        parts.append((("{" if i == 0 else "") + compact(key) + colon, learn_keys))
        end = "}" if last else comma
        text = compact(value)
        if isinstance(value, list):
            text = '["' + f'"{comma}"'.join(value) + '"]' if value else "[]"
            parts += [('["', learn_keys), (text[2:], True), (end, learn_keys)]
        elif isinstance(value, str):
            parts += [('"', learn_keys), (text[1:], True), (end, learn_keys)]
        elif isinstance(value, int) and not isinstance(value, bool):
            # the digits' end is forced too, but a model that writes freely must learn to end them
            parts += [(text, True), (end, learn_keys)]
        else:
            parts += [(text, True), (end, learn_keys)]
    return parts
