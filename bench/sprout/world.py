"""The micro-world: a few people, places and companies with facts, and passages that state them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.sprout.attribute import Attribute, Kind, spoken
from bench.sprout.attributes import BY_KIND
from bench.sprout.names import Names, Split

FILLER = (
    "The weather was mild that week.",
    "Nothing else was reported.",
    "It was a quiet season.",
    "The road was long.",
    "Many people came to the fair.",
    "A letter arrived on Monday.",
    "The bells rang at noon.",
    "There was music all night.",
    "The harvest was good this time.",
    "Everybody talked about the storm.",
    "The meeting lasted for two hours.",
    "The old bridge was closed for repairs.",
    "Trains were late again.",
    "The market opens early.",
    "A new school will be built soon.",
    "The lights went out for a moment.",
    "No one could say why.",
    "The report was written in a hurry.",
    "Some details are still open.",
    "The garden behind the house is small.",
)


@dataclass(frozen=True)
class Sentence:
    """One sentence of a passage and the facts it states: none for filler, two where two are joined."""

    text: str
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, eq=False)
class Fact:
    subject: Entity
    attribute: Attribute
    value: Any

    @property
    def answer(self) -> str:
        return spoken(self.value)


@dataclass(eq=False)
class Entity:
    name: str
    kind: Kind
    pronoun: str
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """The first name of a person with two names, else the name."""
        return self.name.split(" ")[0] if self.kind == "person" else self.name

    @property
    def missing(self) -> list[Attribute]:
        """Attributes of this kind that are not true or false of the entity: unknown."""
        return [a for a in BY_KIND[self.kind] if a.key not in self.facts]


@dataclass
class World:
    """Entities of one split, drawn with `names.rng`."""

    names: Names
    entities: list[Entity]

    @property
    def rng(self) -> random.Random:
        return self.names.rng

    @property
    def facts(self) -> list[Fact]:
        return [fact for entity in self.entities for fact in entity.facts.values()]

    def passage(self, facts: Sequence[Fact] | None = None, *, plain: bool = False) -> Passage:
        """State the facts (all by default). `plain` gives one paragraph without pronouns or filler."""
        return _write(self.rng, self.facts if facts is None else list(facts), plain)


@dataclass(frozen=True)
class Passage:
    text: str
    sentences: tuple[Sentence, ...]

    def stating(self, fact: Fact) -> str:
        """Return the sentence that states `fact`, as it stands in the passage."""
        return next(s.text for s in self.sentences if fact in s.facts)

    def about(self, entity: Entity) -> list[str]:
        return [s.text for s in self.sentences if any(fact.subject is entity for fact in s.facts)]

    @property
    def facts(self) -> list[Fact]:
        """The facts in the order in which they are stated."""
        return [fact for s in self.sentences for fact in s.facts]

    @property
    def subjects(self) -> list[Entity]:
        """The entities in the order in which they appear."""
        return list(dict.fromkeys(fact.subject for fact in self.facts))


def make_world(
    rng: random.Random,
    split: Split,
    *,
    num_entities: int | None = None,
    kind: Kind | None = None,
    attributes: Sequence[Attribute] = (),
    among: dict[str, tuple[str, ...]] | None = None,
    num_facts: int | None = None,
) -> World:
    """Draw entities with facts.

    Entities of one kind share most of their attributes, so that a question needs both its subject
    and its attribute. Each entity has all of `attributes` (then give `kind`); `among` restricts
    values of closed classes; `num_facts` caps the other facts of an entity.
    """
    names = Names(rng, split)
    count = num_entities or rng.choice((1, 1, 2, 2, 3, 3, 4, 5))
    kinds: list[Kind] = [kind] * count if kind else _kinds(rng, count)
    common = {k: rng.sample(BY_KIND[k], min(len(BY_KIND[k]), rng.randint(2, 6))) for k in dict.fromkeys(kinds)}
    taken: set[str] = set()
    entities = []
    for each in kinds:
        entity = Entity(_fresh(names, each, taken), each, _pronoun(rng, each))
        chosen = [a for a in common[each] if rng.random() < 0.8] or common[each][:1]
        if num_facts is not None:
            chosen = chosen[: max(0, num_facts - len(attributes))]
        chosen += [a for a in attributes if a not in chosen]
        rng.shuffle(chosen)
        for attribute in chosen:
            value = attribute.draw(names, (among or {}).get(attribute.key, ()))
            entity.facts[attribute.key] = Fact(entity, attribute, value)
        entities.append(entity)
    return World(names, entities)


def _kinds(rng: random.Random, count: int) -> list[Kind]:
    dice = rng.random()
    if dice < 0.6:
        return ["person"] * count
    if dice < 0.75:
        return ["place"] * count
    if dice < 0.88:
        return ["company"] * count
    return [rng.choice(("person", "person", "place", "company")) for _ in range(count)]


def _fresh(names: Names, kind: Kind, taken: set[str]) -> str:
    draw = {"person": names.person, "place": names.place, "company": names.company}[kind]
    while (name := draw()) in taken:
        pass
    taken.add(name)
    return name


def _pronoun(rng: random.Random, kind: Kind) -> str:
    return rng.choice(("She", "He")) if kind == "person" else "It"


def _write(rng: random.Random, facts: list[Fact], plain: bool) -> Passage:
    order = list(facts)
    rng.shuffle(order)
    grouped = plain or rng.random() < 0.45
    if grouped:
        place: dict[int, int] = {}
        for fact in order:
            place.setdefault(id(fact.subject), len(place))
        order.sort(key=lambda fact: place[id(fact.subject)])
    pronouns = grouped and not plain and rng.random() < 0.5
    joined = not plain and rng.random() < 0.2
    subjects = {id(fact.subject): fact.subject for fact in order}
    shorts = [subject.short for subject in subjects.values()]
    shorten = not plain and len(set(shorts)) == len(shorts) and rng.random() < 0.3
    sentences: list[Sentence] = []
    before: Entity | None = None
    named: set[int] = set()
    open_end = ""  # the last sentence as a template, if another may be joined to it
    for fact in order:
        subject = fact.subject
        text = fact.attribute.sentence(rng, "{n}", fact.value)
        starts = text.startswith("{n} ")
        name = subject.short if shorten and id(subject) in named else subject.name
        if joined and starts and open_end and before is subject and rng.random() < 0.6:
            last = sentences.pop()
            sentences.append(Sentence(f"{last.text[:-1]} and {text[4:]}".replace("{n}", name), (*last.facts, fact)))
            open_end = ""
            continue
        if pronouns and before is subject and starts and rng.random() < 0.8:
            text = subject.pronoun + text[3:]
        sentences.append(Sentence(text.replace("{n}", name), (fact,)))
        open_end = text if starts and text.endswith(".") else ""
        named.add(id(subject))
        before = subject
    if not plain and rng.random() < 0.3:
        for _ in range(rng.randint(1, 3)):
            # filler between a name and its pronoun would be read as the pronoun's subject
            spot = rng.randint(0, len(sentences)) if not pronouns else rng.choice((0, len(sentences)))
            sentences.insert(spot, Sentence(rng.choice(FILLER)))
    joint = " "
    if not plain:
        dice = rng.random()
        joint = " " if dice < 0.84 else "\n" if dice < 0.95 else "\n- "
    text = joint.join(s.text for s in sentences)
    return Passage(("- " + text) if joint == "\n- " else text, tuple(sentences))
