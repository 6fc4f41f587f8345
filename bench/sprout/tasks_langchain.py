"""LangChain: chat and few-shot prompts, extraction into a schema, tools, map-reduce."""

from __future__ import annotations

from typing import Any

from bench.sprout.document import Document, Message, chat, plain
from bench.sprout.maker import SYSTEMS, UNKNOWN, Maker, assistant, json_parts, user
from bench.sprout.world import Entity, World


def retrieval(make: Maker) -> Document:
    """Return the usual question-answering prompts over retrieved context."""
    world = make.world()
    text = make.passage(world).text
    question, answer, _, detail = make.question(world)
    prompt: list[Message] = list(
        make.wires.messages(make.rng.choice(("stuff", "rag", "qa_system", "qa_human")), context=text, question=question)
    )
    if len(prompt) == 1 and make.chance(0.3):
        content = prompt[0]["content"]
        gap = " " if content.endswith(":") else ""
        return plain("LangChain chat", [(content, False), (gap + answer, True)], detail=detail)
    for _ in range(make.rng.randint(0, 4) if make.split == "train" else 0):
        question, following, _, _ = make.question(world)
        prompt += [assistant(answer), user(question)]
        answer = following
    return chat("LangChain chat", prompt, answer, detail=detail)


def few_shot(make: Maker) -> Document:
    """Example pairs that show what is asked, then the real input."""
    kind = make.kind()
    attribute = make.rng.choice(make.attributes(kind, 1))
    label = make.chance(0.5)
    spaced = make.chance(0.3)
    as_json = make.chance(0.3)
    key = make.rng.choice(attribute.fields)
    system = make.rng.choice((f"Find the {attribute.label}.", *SYSTEMS)) if make.chance(0.7) else ""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    parts: Any = ""
    for i in range(make.rng.randint(2, 6)):
        world = make.world(num_entities=make.rng.choice((1, 2)), kind=kind, attributes=[attribute], num_facts=3)
        entity = make.rng.choice(world.entities)
        fact = entity.facts[attribute.key]
        text = make.passage(world).text
        shown = f"{text}\n{entity.name}" if label or len(world.entities) > 1 else text
        if i:
            messages.append(assistant("".join(text for text, _ in parts) if isinstance(parts, list) else parts))
        messages.append(user(shown))
        parts = json_parts({key: fact.value}, learn_keys=True, spaced=spaced) if as_json else fact.answer
    return chat("LangChain few-shot", messages, parts, detail=attribute.key)


def extraction(make: Maker) -> Document:
    """with_structured_output: only the messages are sent, the schema forces the keys."""
    kind = make.kind()
    world = make.world(num_entities=1, kind=kind)
    entity = world.entities[0]
    text = make.passage(world).text
    obj = _record(make, entity, nulls=0.15)
    name = make.rng.choice(("extract", "extract", "extract_short", "tagging"))
    prompt: list[Message] = list(make.wires.messages(name, text=text))
    if make.chance(0.4):
        system = (
            make.rng.choice(SYSTEMS)
            + " "
            + make.rng.choice(
                (
                    "Extract the record.",
                    "Fill in the form.",
                    "Extract the person described in the text.",
                    "Always answer in the required format.",
                )
            )
        )
        prompt = [{"role": "system", "content": system}, user(text)]
    if make.chance(0.25):
        prompt[-1] = user(prompt[-1]["content"] + f"\nReturn JSON with the keys {', '.join(obj)}.")
        return chat("LangChain extraction", prompt, json_parts(obj, learn_keys=True))
    parts = json_parts(obj, learn_keys=False, spaced=make.chance(0.2))
    return chat("LangChain extraction", prompt, parts, detail="schema")


def _record(make: Maker, entity: Entity, nulls: float = 0.0) -> dict[str, Any]:
    """Return some fields of an entity; a field that the text does not state is null."""
    obj: dict[str, Any] = {}
    if make.chance(0.6):
        obj[make.rng.choice(("name", "name", "full_name", "title", "who"))] = entity.name
    facts = list(entity.facts.values())
    for fact in make.rng.sample(facts, make.rng.randint(1, min(5, len(facts)))):
        obj.setdefault(make.rng.choice(fact.attribute.fields), fact.value)
    stated = {name for fact in facts for name in fact.attribute.fields}
    for attribute in make.rng.sample(entity.missing, min(2, len(entity.missing))):
        key = make.rng.choice(attribute.fields)
        if key not in stated and make.chance(nulls):
            obj[key] = None
    return dict(make.rng.sample(list(obj.items()), len(obj))) if make.chance(0.5) else obj


def people(make: Maker) -> Document:
    """Return a list of records under one key: {"people": [{...}, ...]}, all of it in the schema's shape."""
    kind = make.kind()
    attributes = make.attributes(kind, make.rng.choice((1, 2, 2)))
    world = make.world(num_entities=make.rng.randint(1, 4), kind=kind, attributes=attributes, num_facts=3)
    passage = make.passage(world)
    order = passage.subjects
    keys = [make.rng.choice(a.fields) for a in attributes]
    outer = {"person": "people", "place": "places", "company": "companies"}[kind]
    records = [
        {"name": e.name} | {k: e.facts[a.key].value for k, a in zip(keys, attributes, strict=True)} for e in order
    ]
    prompt: list[Message] = list(make.wires.messages(make.rng.choice(("extract", "extract_short")), text=passage.text))
    parts: list[tuple[str, bool]] = [(f'{{"{outer}":[', False)]
    for i, record in enumerate(records):
        inner = json_parts(record, learn_keys=False)
        assert isinstance(inner, list)
        parts += inner
        more = i < len(records) - 1
        parts.append((",", True) if more else ("]", True))
    return chat("LangChain extraction", prompt, [*parts, ("}", False)], detail="list of records")


def digest(world: World, order: list[Entity]) -> str:
    """Return the summary that the model is taught: each subject with its values, in the order of the text."""
    return "\n".join(f"{e.name}: {', '.join(fact.answer for fact in e.facts.values())}." for e in order)


def map_reduce(make: Maker) -> Document:
    """Map: summarize or search one chunk. Reduce: join summaries or pick the answer."""
    variant = make.rng.choice(("map", "reduce", "search", "pick", "pick"))
    world = make.world(num_entities=make.rng.randint(1, 3), num_facts=4)
    if variant in ("map", "reduce"):
        passage = world.passage(plain=True)
        order = passage.subjects
        for entity in order:
            entity.facts = {fact.attribute.key: fact for fact in passage.facts if fact.subject is entity}
        if variant == "map":
            prompt = make.wires.messages(
                make.rng.choice(("summary", "summary_human", "li_summary")), text=passage.text, context=passage.text
            )
            return chat("map-reduce", prompt, digest(world, order), detail=variant)
        lines = digest(world, order)
        gap = make.rng.choice(("\n", "\n\n"))
        return chat("map-reduce", make.wires.messages("reduce", text=lines.replace("\n", gap)), lines, detail=variant)
    if variant == "search":
        question, _, fact, _ = make.question(world, unknown=0.4)
        passage = world.passage(plain=True)
        prompt = make.wires.messages("map_question", context=passage.text, question=question)
        return chat("map-reduce", prompt, passage.stating(fact) if fact else UNKNOWN, detail=variant)
    question, answer, _, _ = make.question(world, unknown=0.0)
    found = [answer if i == 0 else UNKNOWN for i in range(make.rng.randint(1, 5))]
    make.rng.shuffle(found)
    shape = make.rng.choice(
        (
            "Question: {q}\nAnswers from parts of a document:\n{a}\nFinal answer:",
            "These answers come from different chunks:\n{a}\n\nCombine them and answer the question: {q}",
            "{q}\nPartial answers:\n{a}\nGive the final answer.",
        )
    )
    listed = "\n".join(make.rng.choice(("- {}", "{}")).format(f) for f in found)
    return chat("map-reduce", [*make.system(0.2), user(shape.format(q=question, a=listed))], answer, detail=variant)
