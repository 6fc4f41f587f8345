"""Lists and summaries: who has what, who is named, what is said about somebody."""

from __future__ import annotations

from bench.sprout.attribute import Attribute
from bench.sprout.attributes import BY_KIND
from bench.sprout.document import Document, Message, chat
from bench.sprout.maker import Maker, assistant, user
from bench.sprout.world import Passage, World


def listing(make: Maker) -> Document:
    """Which people, which facts: lists and extracts from the passage."""
    if make.split == "train":
        return _list_lesson(make)
    kind = make.kind()
    closed = [a for a in BY_KIND[kind] if a.pool and a.type == "str"]
    attribute = make.rng.choice(closed)
    among = {attribute.key: tuple(make.rng.sample(attribute.pool, make.rng.choice((2, 2, 3))))}
    shared = make.chance(0.6)
    world = make.world(
        num_entities=make.rng.randint(2, 5),
        kind=kind,
        num_facts=make.rng.choice((3, 4, 6)),
        attributes=[attribute] if shared else (),
        among=among,
    )
    passage = make.passage(world)
    variant = make.rng.choice(("facts", "facts", "names") + (("who", "who") if shared else ()))
    question, answer = _list_question(make, world, passage, variant, attribute, among)
    message = make.rng.choice(_LIST_SHAPES).format(p=passage.text, q=question)
    return chat("lists and summaries", [*make.system(0.3), user(message)], answer, detail=variant)


def _list_lesson(make: Maker) -> Document:
    """Return several lists from one passage. Most are who has what, over more subjects than a test has and over one to
    three attributes; no question comes twice, since its answer could be copied from the first time.
    """
    kind = make.kind()
    closed = [a for a in BY_KIND[kind] if a.pool and a.type == "str"]
    shared = make.rng.sample(closed, min(len(closed), make.rng.choice((1, 2, 3))))
    among = {a.key: tuple(make.rng.sample(a.pool, make.rng.choice((2, 2, 3, 4)))) for a in shared}
    world = make.world(
        num_entities=make.rng.choice((2, 3, 3, 4, 4, 5, 5, 6, 7)),
        kind=kind,
        num_facts=make.rng.choice((3, 4, 6)),
        attributes=shared,
        among=among,
    )
    passage = make.passage(world)
    messages: list[Message] = []
    answers: list[str] = []
    for _ in range(make.rng.randint(1, 8)):
        variant = make.rng.choice(("who", "who", "who", "who", "facts", "names", "each"))
        question, answer = _list_question(make, world, passage, variant, make.rng.choice(shared), among)
        if answer in answers:
            continue
        if answers:
            messages.append(assistant(answers[-1]))
        shape = "{q}" if answers else make.rng.choice(_LIST_SHAPES)
        messages.append(user(shape.format(p=passage.text, q=question)))
        answers.append(answer)
    return chat("lists and summaries", [*make.system(0.3), *messages], answers[-1], detail="lesson")


def _list_question(
    make: Maker, world: World, passage: Passage, variant: str, attribute: Attribute, among: dict[str, tuple[str, ...]]
) -> tuple[str, str]:
    """Return one question whose answer is a list, and the answer."""
    if variant == "names":
        question = make.rng.choice(
            (
                "List the names in the order in which they appear.",
                "Who or what is the text about? List all names.",
                "Name everybody and everything described in the text.",
            )
        )
        return question, ", ".join(subject.name for subject in passage.subjects)
    stated = [fact for fact in passage.facts if fact.attribute is attribute]
    if variant == "each":
        ask = make.rng.choice(("List each name with the {l}.", "Which {l} does each have?", "Name and {l} of each?"))
        return ask.format(l=attribute.label), ", ".join(f"{fact.subject.name}: {fact.answer}" for fact in stated)
    if variant == "who":
        value = make.rng.choice(among[attribute.key])
        found = ", ".join(fact.subject.name for fact in stated if fact.value == value)
        return make.rng.choice(_WHO_ASKS).format(l=attribute.label, v=value), found or "nobody"
    entity = make.rng.choice(world.entities)
    lines = make.chance(0.5)
    asks = _LINE_ASKS if lines else _SUMMARY_ASKS
    return make.rng.choice(asks).format(n=entity.name), ("\n" if lines else " ").join(passage.about(entity))


_LIST_SHAPES = ("{p}\n\n{q}", "Text: {p}\n\n{q}", "{q}\n\n{p}")
_WHO_ASKS = (
    "Who has the {l} {v}? List the names.",
    "List the names with the {l} {v}.",
    "Which names have {v} as {l}?",
)
_LINE_ASKS = (
    "List the facts about {n}, one per line.",
    "Which facts about {n} does the text state? One per line.",
    "Copy every sentence about {n} on a line of its own.",
)
_SUMMARY_ASKS = (
    "Summarize what the text says about {n}.",
    "What does the text say about {n}?",
    "Describe {n}.",
    "Write a short summary about {n}.",
)
