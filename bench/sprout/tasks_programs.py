"""Interleaved programs (Guidance and the native language), multiple choice, arithmetic, judging."""

from __future__ import annotations

from bench.sprout.attribute import spoken
from bench.sprout.document import Document, Message, chat, plain
from bench.sprout.maker import Maker, assistant, json_parts, user
from bench.sprout.names import words
from bench.sprout.tasks_chat import GREETING

_LETTERS = "ABCDEFGH"


def interleaved(make: Maker) -> Document:
    """Given labels, generated values: one reply (or running text) with several gaps."""
    kind = make.kind()
    world = make.world(num_entities=make.rng.choice((1, 1, 2, 3)), kind=kind)
    entity = make.rng.choice(world.entities)
    text = make.passage(world).text
    facts = make.rng.sample(list(entity.facts.values()), make.rng.randint(1, min(5, len(entity.facts))))
    parts: list[tuple[str, bool]] = []
    style = make.rng.choice(("lines", "lines", "sentences", "quoted", "list"))
    for i, fact in enumerate(facts):
        label = make.rng.choice((fact.attribute.label, *(f.replace("_", " ") for f in fact.attribute.fields)))
        if style == "lines":
            parts += [(f"{label.capitalize()}: ", False), (fact.answer + "\n", True)]
        elif style == "sentences":
            opening = make.rng.choice(("The {l} of {n} is ", "{n}'s {l} is ", "The {l} is "))
            parts += [((" " if i else "") + opening.format(l=label, n=entity.name), False), (fact.answer + ".", True)]
        elif style == "quoted":
            parts += [(f'{label} = "', False), (fact.answer + '"', True), ("\n", False)]
        else:
            parts += [(f"{i + 1}. {label}: ", False), (fact.answer + "\n", True)]
    ask = make.rng.choice(("Describe {n}.", "Tell me about {n}.", "Fill in the form about {n}.", "Who is {n}?"))
    if make.chance(0.4):
        head = make.rng.choice(("{p}\n\n", "{p}\n", "Text: {p}\n\n")).format(p=text) + f"{entity.name}\n"
        return plain("interleaved programs", [(head, False), *parts], detail=style, scored_from=1)
    request = make.rng.choice(("{p}\n\n{q}", "{q}\n\n{p}")).format(p=text, q=ask.format(n=entity.name))
    return chat("interleaved programs", [*make.system(0.4), user(request)], parts, detail=style)


def form(make: Maker) -> Document:
    """Return a JSON skeleton given piece by piece, as a program writes it."""
    world = make.world(num_entities=make.rng.choice((1, 1, 2)))
    entity = make.rng.choice(world.entities)
    facts = make.rng.sample(list(entity.facts.values()), make.rng.randint(1, min(4, len(entity.facts))))
    obj = {"name": entity.name} | {make.rng.choice(f.attribute.fields): f.value for f in facts}
    parts = json_parts(obj, learn_keys=False, spaced=make.chance(0.5))
    assert isinstance(parts, list)
    text = make.passage(world).text
    if make.chance(0.5):
        return plain(
            "interleaved programs",
            [(f"{text}\n\n{entity.name} as JSON: ", False), *parts],
            detail="form",
            scored_from=1,
        )
    return chat("interleaved programs", [user(f"{text}\n\nDescribe {entity.name} as JSON.")], parts, detail="form")


def multiple_choice(make: Maker) -> Document:
    """Return a passage and lettered options, with solved examples before it or not; chat or running text."""
    subject = make.rng.choice(("people", "places", "history", "a short text", "reading", "general knowledge"))
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    shots = make.rng.choice((0, 0, 1, 2, 3, 5))
    shared = make.chance(0.5)
    count = make.rng.choice((4, 4, 4, 4, 3, 5, 2))
    world = make.world()
    blocks: list[tuple[str, str]] = []
    detail = ""
    for i in range(shots + 1):
        if not shared and i:
            world = make.world(num_entities=make.rng.randint(1, 3))
        fact = None
        while fact is None or fact.attribute.type == "bool":
            question, _, fact, detail = make.question(world, unknown=0.0)
            if all(f.attribute.type == "bool" for f in world.facts):
                world = make.world()
                fact = None
                blocks.clear()
        options = {fact.answer}
        others = [f.answer for f in world.facts if f.attribute is fact.attribute]
        for _ in range(40):  # a small class may have fewer values than there are letters
            if len(options) == count:
                break
            drawn = make.rng.choice(others) if others and make.chance(0.3) else spoken(fact.attribute.draw(make.names))
            options.add(drawn)
        order = sorted(options)
        make.rng.shuffle(order)
        lines = "\n".join(f"{_LETTERS[j]}. {option}" for j, option in enumerate(order))
        passage = f"{make.passage(world).text}\n" if not shared or not blocks else ""
        blocks.append((f"{passage}{question}\n{lines}\nAnswer:", _LETTERS[order.index(fact.answer)]))
    if make.chance(0.5):
        parts: list[tuple[str, bool]] = [(head if shots or make.chance(0.5) else "", False)]
        for i, (block, letter) in enumerate(blocks):
            parts += [(("\n\n" if i else "") + block, False), (f" {letter}", True)]
        return plain("multiple choice", parts, detail=detail)
    messages: list[Message] = make.system(0.3)
    if make.chance(0.5):
        text = "".join(f"{block} {letter}\n\n" for block, letter in blocks[:-1]) + blocks[-1][0]
        return chat("multiple choice", [*messages, user((head if shots else "") + text)], blocks[-1][1], detail=detail)
    for block, letter in blocks[:-1]:
        messages += [user(block), assistant(letter)]
    return chat("multiple choice", [*messages, user(blocks[-1][0])], blocks[-1][1], detail=detail)


def story(make: Maker) -> tuple[str, str, int]:
    """Return a word problem: (question, steps, result) with one to three steps on small numbers."""
    name = make.names.invented()
    thing = make.rng.choice(("apples", "books", "coins", "cards", "eggs", "stamps", "shells", "pens", "tickets"))
    have = make.rng.randint(2, 60)
    text = [make.rng.choice((f"{name} has {have} {thing}.", f"There are {have} {thing} in the box of {name}."))]
    steps = []
    for _ in range(make.rng.choice((1, 2, 2, 3))):
        kind = make.rng.choice(("plus", "minus", "times") if have <= 9 else ("plus", "minus", "minus"))
        if kind == "plus":
            n = make.rng.randint(1, 40)
            text.append(make.rng.choice((f"{name} buys {n} more.", f"A friend brings {n}.", f"{name} finds {n}.")))
            steps.append(f"{have} + {n} = {have + n}")
            have += n
        elif kind == "minus":
            n = make.rng.randint(min(1, have), have)
            text.append(make.rng.choice((f"{name} gives away {n}.", f"{name} loses {n}.", f"{name} sells {n}.")))
            steps.append(f"{have} - {n} = {have - n}")
            have -= n
        else:
            n = make.rng.randint(2, 9)
            text.append(f"Then the number grows {n} times.")
            steps.append(f"{have} * {n} = {have * n}")
            have *= n
    ask = make.rng.choice((f"How many {thing} does {name} have now?", f"How many {thing} are there now?"))
    return " ".join([*text, ask]), ". ".join(steps) + ".", have


def arithmetic(make: Maker) -> Document:
    """Sums and word problems, step by step or the result alone for one step."""
    if make.chance(0.4):
        messages: list[Message] = make.system(0.2)
        answer = ""
        for i in range(make.rng.randint(1, 8) if make.split == "train" else 1):
            a, b = make.rng.randint(0, 99), make.rng.randint(0, 99)
            symbol = make.rng.choice("+-")
            if make.chance(0.25):
                a, b, symbol = a % 10, b % 10, "*"
            if i:
                messages.append(assistant(answer))
            ask = make.rng.choice(
                (
                    "What is {a} {s} {b}?",
                    "{a} {s} {b} =",
                    "Calculate {a} {s} {b}.",
                    "How much is {a} {s} {b}?",
                    "What is {a} {s} {b}",
                )
            )
            messages.append(user(ask.format(a=a, b=b, s=symbol)))
            answer = str(a + b if symbol == "+" else a - b if symbol == "-" else a * b)
        return chat("arithmetic", messages, answer, detail="one step")
    variant = make.rng.choice(("chat", "few-shot", "text"))
    solved = [story(make) for _ in range(1 if variant == "chat" else make.rng.randint(2, 5))]
    if variant == "chat":
        question, steps, result = solved[0]
        hint = make.rng.choice((" Think step by step.", " Let's think step by step.", "\nReason step by step."))
        ask = question + hint
        return chat("arithmetic", [*make.system(0.2), user(ask)], f"{steps} The answer is {result}.", detail="steps")
    if variant == "few-shot":
        messages = make.system(0.2)
        for question, steps, result in solved[:-1]:
            messages += [user(question), assistant(f"{steps} The answer is {result}.")]
        question, steps, result = solved[-1]
        return chat("arithmetic", [*messages, user(question)], f"{steps} The answer is {result}.", detail="steps")
    parts: list[tuple[str, bool]] = []
    mark = make.rng.choice(("####", "The answer is"))
    for question, steps, result in solved:
        parts += [(f"Question: {question}\nAnswer:", False), (f" {steps}\n{mark} {result}\n\n", True)]
    return plain("arithmetic", parts, detail="steps", scored_from=2 * len(solved) - 1)


GRADES = {
    5: ("excellent", "brilliant", "outstanding", "superb", "flawless"),
    4: ("good", "strong", "solid", "convincing", "pleasant"),
    3: ("average", "acceptable", "ordinary", "fair", "moderate"),
    2: ("weak", "poor", "dull", "shaky", "thin"),
    1: ("terrible", "awful", "dreadful", "hopeless", "miserable"),
}
DIMENSIONS = words(
    "clarity style content depth humour structure grammar evidence pace plot dialogue tone service food price comfort "
    "originality accuracy length vocabulary"
)


def judge(make: Maker) -> Document:
    """Rate a text in several dimensions, in turns, in a form, or as JSON; then grade it."""
    count = make.rng.randint(1, 5)
    dimensions = make.rng.sample(DIMENSIONS, count + make.rng.randint(0, 2))
    rating = {d: make.rng.randint(1, 5) for d in dimensions}
    said = [
        make.rng.choice(
            ("The {d} is {a}.", "I found the {d} {a}.", "Its {d} is {a}.", "The {d} seems {a} to me.")
        ).format(d=d, a=make.rng.choice(GRADES[r]))
        for d, r in rating.items()
    ]
    make.rng.shuffle(said)
    review = " ".join(said)
    asked = make.rng.sample(dimensions, count)
    opening = make.rng.choice(("Review: {r}", "{r}", "Essay review:\n{r}", "Here is a review.\n\n{r}"))
    system = [{"role": "system", "content": "You judge essays."}] if make.chance(0.4) else make.system(0.2)
    shape = make.rng.choice(("turns", "turns", "form", "json", "grade", "verdict"))
    if shape == "turns":
        how = make.rng.choice(
            (
                "Rate the {d} from 1 to 5.",
                "Rate the {d}.",
                "How is the {d}, from 1 to 5?",
                "Give a score from 1 to 5 for {d}.",
            )
        )
        messages: list[Message] = [*system, user(opening.format(r=review))]
        joined = make.chance(0.5)
        if joined:
            messages[-1] = user(f"{opening.format(r=review)}\n\n{how.format(d=asked[0])}")
        else:
            messages += [user(how.format(d=asked[0]))]
        for before, dimension in zip(asked, asked[1:], strict=False):
            messages += [assistant(str(rating[before])), user(how.format(d=dimension))]
        return chat("judging", messages, str(rating[asked[-1]]), detail=shape)
    if shape == "verdict":
        good = rating[asked[0]] >= 4
        ask = f"Is the {asked[0]} good? Answer yes or no."
        messages = [*system, user(f"{opening.format(r=review)}\n\n{ask}")]
        return chat("judging", messages, "yes" if good else "no", detail=shape)
    if shape == "grade":
        listed = make.rng.choice(("Ratings: {x}", "Ratings: {x}\nGrade the essay with A, B or C."))
        values = [rating[d] for d in asked]
        text = listed.format(x=", ".join(str(v) for v in values))
        lowest = min(values)
        grade = "A" if lowest >= 4 else "B" if lowest == 3 else "C"
        if make.chance(0.5):
            first = [user(opening.format(r=review))] if make.chance(0.6) else []
            return chat("judging", [*system, *first, user(text)], [("Grade: ", False), (grade, True)], detail=shape)
        return chat("judging", [*system, user(text)], grade, detail=shape)
    request = f"{opening.format(r=review)}\n\nRate from 1 to 5: {', '.join(asked)}."
    if shape == "json":
        parts = json_parts({d: rating[d] for d in asked}, learn_keys=make.chance(0.5))
    else:
        parts = [p for d in asked for p in ((f"{d.capitalize()}: ", False), (f"{rating[d]}\n", True))]
    return chat("judging", [*system, user(request)], parts, detail=shape)


def program_turns(make: Maker) -> Document:
    """Return a program that goes on after each generated turn: passage, several short asks, a greeting in between."""
    world = make.world(num_entities=make.rng.choice((1, 2, 3)))
    messages = [*make.system(0.5), user(make.passage(world).text)]
    for _ in range(make.rng.randint(0, 3)):
        question, answer, _, _ = make.question(world)
        messages += [user(question), assistant(answer)]
        if make.chance(0.1):
            messages += [user("Hello"), assistant(GREETING)]
    question, answer, _, detail = make.question(world)
    return chat("chat recall", [*messages, user(question)], answer, detail=detail)
