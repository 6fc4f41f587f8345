"""Plain chat and running text: questions about passages, recall, lists, summaries, JSON."""

from __future__ import annotations

from bench.sprout.attribute import Attribute, Kind, spoken_list
from bench.sprout.attributes import BY_KIND
from bench.sprout.document import Document, Message, chat, compact, plain
from bench.sprout.maker import Maker, assistant, json_parts, user
from bench.sprout.names import words
from bench.sprout.tokenizer import num_pieces
from bench.sprout.wires import PLACEHOLDER, fill
from bench.sprout.world import FILLER, World

_SHAPES = (
    "{p}\n\n{q}",
    "Passage: {p}\nQuestion: {q}",
    "Context:\n{p}\n\nQuestion: {q}\nAnswer:",
    "{q}\n\n{p}",
    "Text: {p}\n\n{q}",
    "Read the text and answer the question.\n\n{p}\n\n{q}",
    "{p} {q}",
    "Context: {p}\n\n{q}",
    "Answer the question using only the context.\nContext: {p}\nQuestion: {q}",
    "Question: {q}\nPassage: {p}",
    'Here is a text:\n"""\n{p}\n"""\n{q}',
    "Document:\n{p}\n\nQ: {q}\nA:",
    "{p}\n{q}",
)
_GREETINGS = (
    "Hello",
    "Hello!",
    "hello",
    "Hi",
    "Hi there!",
    "Good morning!",
    "hi",
    "Hey",
    "how are you",
    "How are you?",
    "Hello, how are you?",
    "Good evening.",
)
GREETING = "Hello! How can I help you?"
_WHAT = (
    "I am sprout, a small language model that comes with GraftLM. I find facts in short texts, fill in forms and JSON, "
    "and call tools."
)
_ABOUT_ITSELF = tuple(
    (ask, _WHAT)
    for ask in (
        "Who are you?",
        "What are you?",
        "What can you do?",
        "What is your name?",
        "who are you",
        "Introduce yourself.",
        "Tell me about yourself.",
        "Which model are you?",
    )
)
CAPITALS = dict(
    pair.split("=")
    for pair in words(
        "France=Paris Germany=Berlin Italy=Rome Spain=Madrid Portugal=Lisbon Austria=Vienna Poland=Warsaw "
        "Greece=Athens Norway=Oslo Sweden=Stockholm Finland=Helsinki Denmark=Copenhagen Ireland=Dublin "
        "England=London Hungary=Budapest Japan=Tokyo China=Beijing India=Delhi Egypt=Cairo Kenya=Nairobi Peru=Lima "
        "Cuba=Havana Canada=Ottawa Russia=Moscow Turkey=Ankara Thailand=Bangkok Vietnam=Hanoi Belgium=Brussels "
        "Croatia=Zagreb Latvia=Riga"
    )
)
_PARTING = (
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Thanks a lot.", "You are welcome!"),
    ("Goodbye", "Goodbye!"),
    ("Bye!", "Goodbye!"),
)
_RECALL_OPENINGS = (
    "I will tell you a few facts. Remember them.",
    "Please remember what I say.",
    "Let me tell you about some people.",
    "I want you to keep some facts in mind.",
)


def turns(make: Maker, world: World, count: int) -> tuple[list[Message], str, str]:
    """Return messages of `count` questions, all but the last answered; the last answer; and its detail."""
    messages: list[Message] = []
    for _ in range(count - 1):
        question, answer, _, _ = make.question(world)
        messages += [user(question), assistant(answer)]
    question, answer, _, detail = make.question(world)
    return [*messages, user(question)], answer, detail


def passage_question(make: Maker) -> Document:
    """Return a passage, a question; in half of the documents more questions on the same passage follow."""
    world = make.world()
    text = make.passage(world).text
    count = 1 if make.chance(0.4) else make.rng.randint(2, 8)
    if make.split != "train":
        count = 1 if make.chance(0.8) else 2
    asked, answer, detail = turns(make, world, count)
    shape = make.rng.choice(_SHAPES)
    asked[0] = user(shape.format(p=text, q=asked[0]["content"]))
    return chat("passage questions", [*make.system(), *asked], answer, detail=detail)


def passage_in_system(make: Maker) -> Document:
    """Return the passage stands in the system turn; questions follow."""
    world = make.world()
    text = make.passage(world).text
    system = make.rng.choice(
        (
            "Use the context information below to assist the user.\n--------------------\n{p}\n--------------------\n",
            "Answer the user's questions from this text.\n\n{p}",
            "Context: {p}",
            "You know the following: {p}",
            "You are a helpful assistant. Here is what you know:\n{p}",
        )
    ).format(p=text)
    asked, answer, detail = turns(make, world, make.rng.choice((1, 1, 2, 3, 5, 7)))
    return chat("passage questions", [{"role": "system", "content": system}, *asked], answer, detail=detail)


def long_passage(make: Maker) -> Document:
    """Return a passage of up to some 3,000 tokens; the answer may stand at its very beginning."""
    world = make.world(num_entities=make.rng.randint(6, 26))
    text = make.passage(world).text
    asked, answer, detail = turns(make, world, 1 if make.split != "train" else make.rng.randint(2, 12))
    asked[0] = user(make.rng.choice(_SHAPES).format(p=text, q=asked[0]["content"]))
    return chat("long passages", [*make.system(), *asked], answer, detail=detail)


def far_passage(make: Maker) -> Document:
    """Return a fact about somebody, at least 3,000 tokens of filler with facts about others, then the question."""
    world = make.world(num_entities=make.rng.randint(4, 16), num_facts=5)
    first, *others = world.entities
    rest = [s.text for s in world.passage([f for e in others for f in e.facts.values()], plain=True).sentences]
    missing = make.rng.randint(1500, 3500) if make.split == "train" else 3000
    missing -= sum(num_pieces(text) + 1 for text in rest)
    while missing > 0:
        text = make.rng.choice(FILLER)
        missing -= num_pieces(text) + 1
        rest.insert(make.rng.randint(0, len(rest)), text)
    passage = " ".join((world.passage(list(first.facts.values())).text, *rest))
    messages: list[Message] = []
    for _ in range(make.rng.randint(1, 8) if make.split == "train" else 0):
        question, answer, _, _ = make.question(world)
        messages += [user(question), assistant(answer)]
    fact = make.one_of(first)
    messages.append(user(fact.attribute.question(make.rng, make.call(world, first))))
    messages[0] = user(f"{passage}\n\n{messages[0]['content']}")
    return chat("3,000 tokens back", messages, fact.answer, detail=fact.attribute.key)


def running_text(make: Maker) -> Document:
    """Question and answer without a chat template, as plain completion models are asked."""
    world = make.world()
    text = make.passage(world).text
    shape, ask, reply = make.rng.choice(
        (
            ("{p}\n\n", "Question: {q}\nAnswer: ", "{a}\n"),
            ("Context: {p}\n", "Q: {q}\nA: ", "{a}\n"),
            ("{p}\n", "Q: {q}\nA: ", "{a}\n\n"),
            ("Passage:\n{p}\n\n", "Question: {q}\nAnswer:", " {a}\n\n"),
            (
                "Context information is below.\n---------------------\n{p}\n---------------------\n",
                "Query: {q}\nAnswer: ",
                "{a}\n",
            ),
        )
    )
    parts: list[tuple[str, bool]] = [(shape.format(p=text), False)]
    detail = ""
    for _ in range(make.rng.randint(1, 6)):
        question, answer, _, detail = make.question(world)
        parts += [(ask.format(q=question), False), (reply.format(a=answer), True)]
    return plain("running text", parts, detail=detail)


def recall(make: Maker) -> Document:
    """Facts told turn by turn, asked for later."""
    world = make.world(num_entities=make.rng.choice((1, 2, 2, 3, 4)))
    told = make.rng.sample(world.facts, min(len(world.facts), make.rng.randint(1, 8)))
    messages = make.system(0.4)
    if make.chance(0.3):
        messages += [user(make.rng.choice(_RECALL_OPENINGS)), assistant("Noted.")]
    known = []
    for fact in told:
        messages += [user(fact.attribute.sentence(make.rng, fact.subject.name, fact.value)), assistant("Noted.")]
        known.append(fact)
        if make.chance(0.35):
            old = make.rng.choice(known)
            messages += [user(old.attribute.question(make.rng, old.subject.name)), assistant(old.answer)]
    fact = make.rng.choice(known)
    messages.append(user(fact.attribute.question(make.rng, fact.subject.name)))
    return chat("chat recall", messages, fact.answer, detail=fact.attribute.key)


def small_talk(make: Maker) -> Document:
    """Usual first messages: a greeting, a capital, a joke."""
    messages: list[Message] = []
    if make.chance(0.3):
        messages += [user(make.rng.choice(_GREETINGS)), assistant(GREETING)]
    dice = make.rng.random()
    ask, answer = make.rng.choice(_GREETINGS), GREETING
    if dice < 0.35:
        country = make.rng.choice(list(CAPITALS))
        ask = make.rng.choice(
            (
                "What is the capital of {c}?",
                "The capital of {c}?",
                "Name the capital of {c}.",
                "What's the capital of {c}?",
                "Which city is the capital of {c}?",
            )
        ).format(c=country)
        answer = CAPITALS[country]
    elif dice < 0.5:
        ask, answer = make.rng.choice(_ABOUT_ITSELF)
    elif dice < 0.75:
        topic = make.rng.choice(("cats", "dogs", "bears", "robots", "pirates", make.names.word() + "s"))
        setup, punchline = f"Why did the {topic} cross the road?", "To get to the other side."
        ask = make.rng.choice(
            (
                "Tell me a joke about {t}.",
                "Tell a joke about {t}.",
                "Give me a joke about {t}.",
                "Give me a joke about {t}, include the punchline.",
                "Do you know a joke about {t}?",
            )
        )
        asked = [*make.system(0.3), *messages, user(ask.format(t=topic))]
        if make.chance(0.5):
            keys = make.rng.choice((("setup", "punchline"), ("question", "answer"), ("joke", "reply")))
            parts = json_parts(dict(zip(keys, (setup, punchline), strict=True)), learn_keys=False)
            return chat("small talk", asked, parts)
        return chat("small talk", asked, f"{setup} {punchline}")
    elif dice < 0.8:
        ask, answer = make.rng.choice(_PARTING)
    return chat("small talk", [*make.system(0.4), *messages, user(ask)], answer)


def claim(make: Maker) -> Document:
    """Is a claim about the passage true?"""
    world = make.world(num_entities=make.rng.randint(1, 3))
    text = make.passage(world).text
    words = make.rng.choice((("yes", "no"), ("yes", "no"), ("true", "false"), ("True", "False"), ("Yes", "No")))
    messages: list[Message] = []
    answer = ""
    for i in range(make.rng.randint(1, 6) if make.split == "train" else 1):
        statement, truth = false_or_true(make, world)
        ask = f"Claim: {statement}\nIs the claim supported by the text? Answer {words[0]} or {words[1]}."
        if messages:
            messages.append(assistant(answer))
        messages.append(user(f"{text}\n\n{ask}" if i == 0 else ask))
        answer = words[0] if truth else words[1]
    return chat("claims", [*make.system(0.3), *messages], answer, detail=words[0])


def false_or_true(make: Maker, world: World) -> tuple[str, bool]:
    """Return a claim about one entity, and whether the world bears it out."""
    fact = make.one_of(make.rng.choice(world.entities))
    truth = make.chance(0.5)
    value = fact.value
    while not truth and value == fact.value:
        others = [
            e.facts[fact.attribute.key].value
            for e in world.entities
            if e is not fact.subject and fact.attribute.key in e.facts
        ]
        value = make.rng.choice(others) if others and make.chance(0.4) else fact.attribute.draw(make.names)
    return fact.attribute.sentence(make.rng, fact.subject.name, value), truth


def json_object(make: Maker) -> Document:
    """JSON on request: keys named in the prompt, or lines turned into an object."""
    if make.chance(0.3):
        return _lines_to_json(make)
    world = make.world(num_entities=make.rng.randint(1, 3))
    entity = make.rng.choice(world.entities)
    facts = make.rng.sample(list(entity.facts.values()), make.rng.randint(1, min(5, len(entity.facts))))
    obj: dict[str, object] = {"name": entity.name} if make.chance(0.6) else {}
    for fact in facts:
        obj.setdefault(make.rng.choice(fact.attribute.fields), fact.value)
    request = make.rng.choice(
        (
            "Describe {n} as JSON with the keys {k}.",
            "Extract a JSON object about {n} with the keys {k}.",
            "Return JSON for {n}: {k}.",
            "Give me the {k} of {n} as JSON.",
            "Output a JSON object with {k} for {n}.",
            "Extract {k} of {n}. Reply with JSON only.",
        )
    ).format(n=entity.name, k=", ".join(obj))
    text = make.passage(world).text
    message = make.rng.choice(("{p}\n\n{q}", "Text: {p}\n\n{q}", "{q}\n\n{p}")).format(p=text, q=request)
    return chat(
        "JSON on request",
        [*make.system(0.3), user(message)],
        json_parts(obj, learn_keys=True),
        detail=facts[-1].attribute.key,
    )


def format_instructions(make: Maker) -> Document:
    """JSON by the instructions that LangChain's and LlamaIndex's output parsers append to a prompt."""
    entry = make.rng.choice(make.wires.instructions)
    kind, attributes = fitting(make, entry["kinds"])
    names = [make.rng.choice(a.fields) for a in attributes]
    if len(set(names)) < len(names):
        return format_instructions(make)
    world = make.world(num_entities=1, kind=kind, attributes=attributes, num_facts=6)
    facts = world.entities[0].facts
    values = {f"zzout{i}": name for i, name in enumerate(names)}
    values |= {"zzrecord": kind, "zzabout": f"A {kind} described in the text"}
    values |= {f"zzoutdesc{i}": f"the {a.label}" for i, a in enumerate(attributes)}
    text = make.passage(world).text
    prompt = make.rng.choice(("{p}", "Extract the record.\n{p}", "Read the text and fill in the record.\n\n{p}"))
    if entry["style"] == "llama_index":
        content = fill(titled(entry["text"], values), values | {"zzquery": prompt.format(p=text)})
    else:
        content = f"{prompt.format(p=text)}\n\n{fill(titled(entry['text'], values), values)}"
    obj = {name: facts[a.key].value for name, a in zip(names, attributes, strict=True)}
    return chat("JSON on request", [*make.system(0.2), user(content)], compact(obj), detail="format instructions")


def fitting(make: Maker, types: list[str]) -> tuple[Kind, list[Attribute]]:
    """Return a kind of entity and one attribute of it for each type; only people have lists."""
    kind: Kind = "person" if "list" in types else make.kind()
    return kind, [make.rng.choice([a for a in BY_KIND[kind] if a.type == t]) for t in types]


def titled(text: str, values: dict[str, str]) -> str:
    """Fill in pydantic's titles, which are the names with capitals and without underscores."""
    for placeholder, value in values.items():
        if PLACEHOLDER.fullmatch(placeholder):
            text = text.replace(placeholder.capitalize(), value.replace("_", " ").title())
    return text


def _lines_to_json(make: Maker) -> Document:
    """`key: value` lines with invented keys: reading and writing JSON without a known vocabulary."""
    obj: dict[str, object] = {}
    for _ in range(make.rng.randint(1, 6)):
        key = "_".join(make.names.word() for _ in range(make.rng.choice((1, 1, 2))))
        obj[key] = make.rng.choice(
            (
                make.names.person,
                make.names.word,
                make.names.code,
                make.names.foreign,
                lambda: make.rng.randint(0, 9999),
                lambda: make.chance(0.5),
            )
        )()
    lines = "\n".join(f"{k}: {compact(v) if isinstance(v, bool) else v}" for k, v in obj.items())
    message = make.rng.choice(("Convert to JSON:\n{x}", "{x}\n\nWrite this as a JSON object.", "As JSON:\n{x}"))
    return chat("JSON on request", [*make.system(0.2), user(message.format(x=lines))], compact(obj), detail="lines")


def repeat(make: Maker) -> Document:
    """Copy a text, a list or a code exactly."""
    draw = (make.names.person, make.names.word, make.names.code, make.names.foreign, make.names.invented)
    items = [make.rng.choice(draw)() for _ in range(make.rng.randint(1, 12))]
    text = make.rng.choice((" ".join(items), ", ".join(items), spoken_list(items), "\n".join(items)))
    ask = make.rng.choice(("Repeat: {x}", "Copy this exactly:\n{x}", 'Say "{x}".', "Repeat after me: {x}"))
    return chat("copying", [*make.system(0.2), user(ask.format(x=text))], text)
