"""Tools in the chat template: calls, results, agents, and records extracted by function calling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.sprout.attribute import spoken_list
from bench.sprout.document import Document, Message, chat
from bench.sprout.maker import Maker, assistant, json_parts, user
from bench.sprout.names import CITIES
from bench.sprout.tasks_chat import GREETING, fitting, titled
from bench.sprout.wires import fill


@dataclass(frozen=True)
class Call:
    """A tool, a request that needs it, the arguments to give, what it returns and the closing answer."""

    schema: dict[str, Any]
    request: str
    name: str
    arguments: dict[str, Any]
    result: str
    answer: str
    sort: str


def _schema(
    make: Maker, name: str, about: str, arguments: dict[str, str], styles: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a tool schema in a framework's own shape; `arguments` maps names to "str" or "int"."""
    kinds = list(arguments.values())
    fitting = [t for t in make.wires.tools if t["arguments"] == kinds and (not styles or t["style"] in styles)]
    values = {"zztool0": name, "zzabout0": about.rstrip(".")}
    for i, argument in enumerate(arguments):
        values |= {f"zzarg0{i}": argument, f"zzargdesc0{i}": f"The {argument.replace('_', ' ')}"}
    text = make.rng.choice(fitting)["schema"]
    for i, argument in enumerate(arguments):
        text = text.replace(f"Zzarg0{i}", argument.replace("_", " ").title())
    schema: dict[str, Any] = json.loads(fill(text, {k: json.dumps(v)[1:-1] for k, v in values.items()}))
    if make.chance(0.15):
        for argument in schema["function"]["parameters"].get("properties", {}).values():
            if argument["type"] == "integer":
                argument |= {"exclusiveMaximum": 1000, "exclusiveMinimum": -1000}
    return schema


def _function_call(make: Maker) -> Call:
    """Return a function named in the request: "What is the value of magic_function(3)? Use the tool." """
    word = make.rng.choice((make.names.word(), "magic", "secret", "special", "test", "custom", "hidden"))
    name = f"{word}_{make.rng.choice(('function', 'function', 'tool', 'fn', 'op', 'calculator', 'formula'))}"
    arguments = make.rng.choice(
        (
            {"input": "int"},
            {"input": "int"},
            {"x": "int"},
            {"n": "int"},
            {"value": "int"},
            {"a": "int", "b": "int"},
            {"x": "int", "y": "int"},
            {},
            {"text": "str"},
        )
    )
    name += "_no_args" if not arguments and make.chance(0.5) else ""
    values: dict[str, Any] = {
        a: make.names.person() if kind == "str" else make.rng.randint(*make.rng.choice(((0, 9), (-99, 999))))
        for a, kind in arguments.items()
    }
    shown = ", ".join(f"'{v}'" if isinstance(v, str) else str(v) for v in values.values())
    request = make.rng.choice(
        (
            "What is the value of {f}({x})? Use the tool.",
            "What is {f}({x})? Use the tool.",
            "Compute {f}({x}).",
            "Call {f}({x}).",
            "Use the tool to find {f}({x}).",
            "What is the value of {f}({x})?",
            "Evaluate {f}({x}).",
        )
    ).format(f=name, x=shown)
    about = make.rng.choice(
        ("Apply a {w} function to an input.", "Calculate a {w} function.", "A {w} tool.", "Compute the {w} value.")
    ).format(w=word)
    result = str(make.rng.randint(-99, 9999))
    return Call(_schema(make, name, about, arguments), request, name, values, result, result, "function")


def _weather(make: Maker) -> Call:
    argument = make.rng.choice(("location", "location", "city", "place", "town"))
    place = make.names.place()
    if make.chance(0.3):
        first, second = make.names.invented(), make.names.invented()
        shape = make.rng.choice(("{a}, {s}", "San {a}, CA", "{a} {b}", "{a}, {b}"))
        place = shape.format(a=first, b=second, s=second[:2].upper())
    if make.split == "train" and make.chance(0.3):
        place = make.rng.choice((*CITIES, "New York, NY", "Los Angeles, CA", "Boston, MA", "Paris, France"))
    request = make.rng.choice(
        (
            "What is the weather in {p}?",
            "What's the weather in {p}?",
            "How is the weather in {p}?",
            "Tell me the weather in {p}.",
            "What is the weather like in {p}?",
            "Is it raining in {p}?",
        )
    ).format(p=place)
    name = make.rng.choice(("get_weather", "get_weather", "weather", "current_weather", "get_current_weather"))
    about = make.rng.choice(
        (
            "Get the weather at a location.",
            "Get weather at a location.",
            "Get the current weather.",
            "Returns the weather for a place.",
        )
    )
    result = make.rng.choice(
        (
            "It's sunny.",
            "It's raining.",
            "Sunny.",
            "cloudy",
            "It is cold.",
            "Fog, 9 degrees.",
            f"{make.rng.randint(-9, 39)} degrees and sunny",
            f"{make.rng.randint(-9, 39)} C",
        )
    )
    schema = _schema(make, name, about, {argument: "str"})
    return Call(schema, request, name, {argument: place}, result, result, "weather")


def _adder(make: Maker) -> Call:
    op, symbol = make.rng.choice((("add", "+"), ("multiply", "*"), ("subtract", "-")))
    word = op.capitalize()
    name = make.rng.choice((op, f"my_{op}er_tool", f"{op}_numbers", "my_adder_tool" if op == "add" else op))
    a, b = make.rng.randint(0, 99), make.rng.randint(0, 99)
    first, second = make.rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    request = make.rng.choice(
        (
            "What is {a} {s} {b}",
            "What is {a} {s} {b}?",
            "Calculate {a} {s} {b}.",
            "How much is {a} {s} {b}?",
            "{w} {a} and {b}.",
        )
    ).format(a=a, b=b, s=symbol, w=word)
    value = a + b if op == "add" else a * b if op == "multiply" else a - b
    result = json.dumps({"result": value}) if make.chance(0.5) else str(value)
    schema = _schema(make, name, f"{word} two integers.", {first: "int", second: "int"})
    return Call(schema, request, name, {first: a, second: b}, result, str(value), "arithmetic")


def _customer(make: Maker) -> Call:
    thing = make.rng.choice(("customer", "customer", "client", "user", "account", "supplier", "contact"))
    name = make.rng.choice((f"create_{thing}", f"unicode_{thing}", f"add_{thing}", f"new_{thing}"))
    script = make.chance(0.7)
    who = make.names.foreign() if script else make.names.company()
    nation = make.rng.choice(("Chinese", "Japanese", "Russian", "Greek", "German", "French", "local", "new", "small"))
    what = make.rng.choice(("technology company", "company", "bakery", "bank", "school", "shop", "trading house"))
    about = f"a {nation} {what}"
    label = make.rng.choice((f" ({make.names.invented()} {make.rng.choice(('Group', 'Corporation', 'Company'))})", ""))
    request = make.rng.choice(
        (
            "Create a {t} named '{w}'{l} - {d}",
            "Add a {t} named '{w}'{l} - {d}",
            'Create a {t} called "{w}"{l}: {d}',
            "Please create a {t} named '{w}'{l} - {d}.",
            "Register the {t} '{w}'{l} - {d}",
        )
    ).format(t=thing, w=who, l=label, d=about)
    argument = make.rng.choice((f"{thing}_name", f"{thing}_name", "name", "title"))
    arguments = {argument: who, "description": about}
    result = f"Created {thing}: {who} - {about}"
    schema = _schema(make, name, f"Tool for creating a {thing}.", {argument: "str", "description": "str"})
    return Call(schema, request, name, arguments, result, result, "customer")


def _lookup(make: Maker) -> Call:
    """Return a record tool: which attribute of whom, found in the question."""
    fact = make.one_of(make.world(num_entities=1).entities[0])
    key = make.rng.choice(fact.attribute.fields)
    name = make.rng.choice(("get", "lookup", "find", "fetch")) + f"_{key}"
    argument = make.rng.choice(("name", "name", "subject", "entity", "who"))
    schema = _schema(make, name, f"Get the {fact.attribute.label} by name.", {argument: "str"})
    question = fact.attribute.question(make.rng, fact.subject.name)
    result = make.rng.choice((fact.answer, fact.attribute.sentence(make.rng, fact.subject.name, fact.value)))
    sort = "weather" if fact.attribute.key == "climate" else f"fact {fact.attribute.key}"
    return Call(schema, question, name, {argument: fact.subject.name}, result, fact.answer, sort)


def _search(make: Maker) -> Call:
    name = make.rng.choice(("search", "web_search", "search_documents", "retrieve", "knowledge_base", "query_engine"))
    fact = make.one_of(make.world(num_entities=1).entities[0])
    question = fact.attribute.question(make.rng, fact.subject.name)
    argument = make.rng.choice(("query", "query", "question", "input"))
    schema = _schema(make, name, "Search for information about people and places.", {argument: "str"})
    result = fact.attribute.sentence(make.rng, fact.subject.name, fact.value)
    return Call(schema, question, name, {argument: question}, result, fact.answer, "search")


def _greeter(make: Maker) -> Call:
    """Return a tool with one free string that the request contains: style, message, title."""
    verb, noun, argument = make.rng.choice(
        (
            ("generate", "greeting", "answer_style"),
            ("send", "message", "text"),
            ("set", "title", "title"),
            ("play", "song", "song"),
            ("open", "page", "page"),
            ("order", "dish", "dish"),
            ("book", "hotel", "hotel"),
        )
    )
    value = make.rng.choice((make.names.invented(), make.names.word(), make.names.person(), "Pirate", "formal"))
    name = make.rng.choice((f"{verb}_{noun}", f"{noun}_{verb}r", f"{noun}_generator"))
    request = make.rng.choice(
        (
            "Using the tool, {v} a {x} {n}.",
            "Please {v} the {n} {x}.",
            "{V} the {n} {x}.",
            "Use the tool to {v} {n} {x}.",
        )
    ).format(v=verb, V=verb.capitalize(), n=noun, x=value)
    schema = _schema(make, name, f"{verb.capitalize()} a {noun}.", {argument: "str"})
    return Call(schema, request, name, {argument: value}, "Done.", "Done.", "command")


_CALLS = (
    _function_call,
    _function_call,
    _weather,
    _weather,
    _adder,
    _customer,
    _customer,
    _lookup,
    _lookup,
    _search,
    _greeter,
)


def tools(make: Maker) -> Document:
    """Tools in the chat template: call one unforced, answer from its result, or need none."""
    drawn = [make.rng.choice(_CALLS)(make) for _ in range(make.rng.choice((1, 1, 1, 2, 3)))]
    sorts = {call.sort.split()[0] for call in drawn}
    clear = len({call.sort for call in drawn}) == len({call.name for call in drawn}) == len(drawn)
    # two tools that answer the same request would leave the choice to chance
    order = drawn if clear and not {"search", "fact"} <= sorts and not {"search", "weather"} <= sorts else drawn[:1]
    make.rng.shuffle(order)
    schemas = [call.schema for call in order]
    system = make.system(0.3)
    dice = make.rng.random()
    if dice < 0.07:
        greeting = make.rng.choice(("Hello", "Hello!", "Hi", "hello", "Good morning!", "Hi there!"))
        return chat("tool calls", [*system, user(greeting)], GREETING, tools=schemas, detail="no tool")
    history: list[Message] = []
    for call in make.rng.sample(order, len(order))[: make.rng.choice((1, 1, 2))]:
        pending = call
        history.append(user(call.request))
        called = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}}],
        }
        history += [called, {"role": "tool", "content": call.result}, assistant(call.answer)]
    if dice < 0.35:
        return chat("tool results", [*system, *history[:-1]], pending.answer, tools=schemas, detail=pending.name)
    parts: Any = _call_parts(make, pending)
    return chat("tool calls", [*system, *history[:-3]], parts, tools=schemas, detail=pending.name)


def _call_parts(make: Maker, call: Call) -> list[tuple[str, bool]]:
    """Return the tool call: mostly written freely, sometimes with its structure forced by a schema."""
    forced = make.chance(0.25)
    inner = json_parts(call.arguments, learn_keys=not forced) if call.arguments else "{}"
    body = inner if isinstance(inner, list) else [(inner, not forced)]
    return [
        ('<tool_call>\n{"name":"', not forced),
        (call.name, True),
        ('","arguments":', not forced),
        *body,
        ("}\n</tool_call>", not forced),
    ]


def agent(make: Maker) -> Document:
    """Two lookups one after the other, then an answer from both."""
    world = make.world(num_entities=1, num_facts=4)
    entity = world.entities[0]
    facts = make.rng.sample(list(entity.facts.values()), min(2, len(entity.facts)))
    argument = make.rng.choice(("name", "name", "subject", "who"))
    names = [f"get_{make.rng.choice(fact.attribute.fields)}" for fact in facts]
    if len(set(names)) < len(names):
        return agent(make)
    schemas = [
        _schema(make, n, f"Get the {f.attribute.label} by name.", {argument: "str"}, ("langchain", "pydantic"))
        for n, f in zip(names, facts, strict=True)
    ]
    make.rng.shuffle(schemas)
    request = f"Tell me the {spoken_list([f.attribute.label for f in facts])} of {entity.name}."
    messages: list[Message] = [*make.system(0.3), user(request)]
    steps = make.rng.randint(0, len(facts))
    for name, fact in zip(names[:steps], facts, strict=False):
        called = {"type": "function", "function": {"name": name, "arguments": {argument: entity.name}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": fact.answer},
        ]
    if steps == len(facts):
        answer = ". ".join(f"{f.attribute.label}: {f.answer}" for f in facts)
        return chat("tool results", messages, answer, tools=schemas, detail="two tools")
    call = Call(schemas[0], request, names[steps], {argument: entity.name}, "", "", "agent")
    return chat("tool calls", messages, _call_parts(make, call), tools=schemas, detail="two tools")


def record_tool(make: Maker) -> Document:
    """Structured output by function calling: the record's schema is a tool, its call the answer."""
    entry = make.rng.choice(make.wires.records)
    kind, attributes = fitting(make, entry["kinds"])
    names = [make.rng.choice(a.fields) for a in attributes]
    if len(set(names)) < len(names):
        return record_tool(make)
    world = make.world(num_entities=1, kind=kind, attributes=attributes, num_facts=6)
    tool = make.rng.choice((kind.capitalize(), "Record", f"{kind.capitalize()}Info", "Data", "extract"))
    values = {f"zzout{i}": name for i, name in enumerate(names)}
    values |= {f"zzoutdesc{i}": f"The {a.label}" for i, a in enumerate(attributes)}
    values |= {"zzrecord": tool, "zzabout": make.rng.choice((f"A {kind}", f"Information about a {kind}"))}
    schema = json.loads(fill(titled(entry["schema"], values), values))
    facts = world.entities[0].facts
    obj = {name: facts[a.key].value for name, a in zip(names, attributes, strict=True)}
    text = make.passage(world).text
    messages: list[Message] = [user(text)]
    if make.chance(0.7):
        messages = list(make.wires.messages(make.rng.choice(("extract", "extract_short", "tagging")), text=text))
    call = Call(schema, text, tool, obj, "", "", "record")
    return chat("LangChain extraction", messages, _call_parts(make, call), tools=[schema], detail="tool")
