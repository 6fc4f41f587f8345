"""LlamaIndex: question answering, refine, tree-summarize, rerank, selectors, in the stock prompts."""

from __future__ import annotations

from bench.sprout.document import Document, Message, chat, compact, plain
from bench.sprout.maker import UNKNOWN, Maker, assistant, json_parts, user
from bench.sprout.world import World, make_world


def _send(make: Maker, family: str, messages: list[dict[str, str]], answer: str, detail: str) -> Document:
    """As chat, or, for a single user turn, sometimes as running text."""
    if len(messages) == 1 and make.chance(0.15):
        return plain(family, [(messages[0]["content"], False), (answer, True)], detail=detail)
    return chat(family, messages, answer, detail=detail)


def question_answering(make: Maker) -> Document:
    world = make.world()
    text = make.passage(world).text
    question, answer, _, detail = make.question(world, unknown=0.12)
    messages = make.wires.messages(make.rng.choice(("li_qa_chat", "li_qa_chat", "li_qa")), context=text, query=question)
    return _send(make, "LlamaIndex QA", messages, answer, detail)


def refine(make: Maker) -> Document:
    """Keep a known answer, or find one that was unknown so far."""
    world = make.world(num_entities=make.rng.randint(1, 3))
    question, answer, fact, _ = make.question(world, unknown=0.0)
    variant = make.rng.choice(("found now", "known before", "known before", "still unknown"))
    other = make_world(make.rng, make.split, num_entities=make.rng.randint(1, 3))
    text = (world if variant == "found now" else other).passage().text
    existing = answer if variant == "known before" else UNKNOWN
    expected = UNKNOWN if variant == "still unknown" else answer
    messages = make.wires.messages(
        make.rng.choice(("li_refine_chat", "li_refine_chat", "li_refine")),
        context=text,
        query=question,
        answer=existing,
    )
    return _send(make, "LlamaIndex refine", messages, expected, variant)


def tree_summarize(make: Maker) -> Document:
    """Leaves: chunks of text. Upper levels: the answers of the level below."""
    world = make.world(num_entities=make.rng.randint(1, 4))
    question, answer, fact, detail = make.question(world, unknown=0.1)
    if fact is not None and make.chance(0.45):
        chunks = [answer, *[UNKNOWN] * make.rng.randint(0, 4)]
        make.rng.shuffle(chunks)
        detail = "answers"
    else:
        facts = world.facts
        make.rng.shuffle(facts)
        cut = make.rng.randint(1, max(1, len(facts) - 1))
        chunks = [world.passage(part, plain=True).text for part in (facts[:cut], facts[cut:]) if part]
    context = make.rng.choice(("\n\n", "\n\n", "\n")).join(chunks)
    messages = make.wires.messages(
        make.rng.choice(("li_tree_chat", "li_tree_chat", "li_tree")), context=context, query=question
    )
    return _send(make, "LlamaIndex tree-summarize", messages, answer, detail)


def chat_engine(make: Maker) -> Document:
    """ContextChatEngine's system turn."""
    world = make.world()
    question, answer, _, detail = make.question(world)
    text = f"Use the context information below to assist the user.\n--------------------\n{world.passage().text}\n"
    messages: list[Message] = [{"role": "system", "content": text + "--------------------\n"}, user(question)]
    return chat("LlamaIndex QA", messages, answer, detail=detail)


def rerank(make: Maker) -> Document:
    """Which numbered document answers the question."""
    world = make.world(num_entities=make.rng.randint(2, 8), num_facts=make.rng.choice((2, 3, 4, 6)))
    texts = [world.passage(list(entity.facts.values()), plain=make.chance(0.7)).text for entity in world.entities]
    context = "\n\n".join(f"Document {i + 1}:\n{text}" for i, text in enumerate(texts))
    question, answer, detail = _document_question(make, world)
    messages: list[Message] = list(make.wires.messages("li_rerank", context=context, query=question))
    if make.chance(0.1):
        return plain("LlamaIndex rerank", [(messages[0]["content"], False), (answer, True)], detail=detail)
    for _ in range(make.rng.randint(0, 6) if make.split == "train" else 0):
        question, following, _ = _document_question(make, world)
        messages += [assistant(answer), user(f"Question: {question}\nAnswer:")]
        answer = following
    return chat("LlamaIndex rerank", messages, answer, detail=detail)


def _document_question(make: Maker, world: World) -> tuple[str, str, str]:
    question, _, fact, detail = make.question(world, unknown=0.0)
    assert fact is not None
    return question, f"Doc: {world.entities.index(fact.subject) + 1}, Relevance: 10", detail


def selector(make: Maker) -> Document:
    """Which of the described choices fits the question; free JSON or a forced {"index": ..., "reason": ...}."""
    world = make.world(num_entities=make.rng.randint(2, 6))
    names = [entity.name for entity in world.entities]
    labels = list(dict.fromkeys(f.attribute.label for f in world.facts))[:6]
    topics = names if make.chance(0.5) else labels
    make.rng.shuffle(topics)
    shape = make.rng.choice(
        (
            "Facts about {t}",
            "Useful for questions about {t}",
            "Information on {t}.",
            "{t}",
            "Answers questions about {t}",
        )
    )
    choices = "\n\n".join(f"({i + 1}) {shape.format(t=t)}" for i, t in enumerate(topics))

    def ask() -> tuple[str, int, str]:
        fact = make.rng.choice([f for f in world.facts if topics is names or f.attribute.label in topics])
        topic = fact.subject.name if topics is names else fact.attribute.label
        question = fact.attribute.question(make.rng, fact.subject.name)
        return question, topics.index(topic) + 1, f"It is about {topic}."

    question, number, reason = ask()
    values = {"count": str(len(topics)), "choices": choices, "query": question}
    free = make.chance(0.5)
    messages: list[Message] = list(make.wires.messages("li_selector" if free else "li_selector_structured", **values))
    key = make.rng.choice(("index", "index", "choice", "ind"))
    for _ in range(make.rng.randint(0, 5) if make.split == "train" else 0):
        done = compact([{"choice": number, "reason": reason}]) if free else compact({key: number, "reason": reason})
        question, number, reason = ask()
        messages += [assistant(done), user(f"Question: '{question}'")]
    if free:
        answer = compact([{"choice": number, "reason": reason}])
        return chat("LlamaIndex selectors", messages, answer, detail="text")
    parts = json_parts({key: number, "reason": reason}, learn_keys=False)
    return chat("LlamaIndex selectors", messages, parts, detail="structured")
