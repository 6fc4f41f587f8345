"""DSPy: signatures of one to four typed fields through ChatAdapter and JSONAdapter, demos, ChainOfThought, ReAct."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.sprout.attribute import Attribute
from bench.sprout.document import Document, Message, Parts, chat
from bench.sprout.maker import Maker, assistant, user
from bench.sprout.tasks_chat import false_or_true
from bench.sprout.wires import dspy_key, fill, react_key

_NOT_SUPPLIED = "Not supplied for this particular example. "
_INCOMPLETE = "This is an example of the task, though some input or output fields are not supplied.\n\n"
_PASSAGE_FIELDS = ("passage", "context", "text", "document", "paragraph", "article", "source_text", "ticket", "story")
_NAME_FIELDS = ("name", "person", "subject", "entity", "who", "topic")
_OBJECTIVES = (
    "Answer the question from the passage.",
    "Answer questions with short factoid answers.",
    "Extract the fields.",
    "Read the text and fill in the fields.",
    "Extract structured information from the text.",
    "Find the facts.",
    "Given a text, produce the values that it states.",
    "Answer the question based on the context.",
)


@dataclass(frozen=True)
class Field:
    """An output field: its name, its template type and the options of a Literal."""

    name: str
    kind: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Signature:
    inputs: tuple[str, ...]
    outputs: tuple[Field, ...]
    objective: str
    input_descriptions: tuple[str, ...] = ()
    output_descriptions: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """Return the values of the template's placeholders."""
        named = {"zzobjective": self.objective}
        named |= {f"zzin{i}": name for i, name in enumerate(self.inputs)}
        named |= {f"zzindesc{i}": text for i, text in enumerate(self.input_descriptions)}
        named |= {f"zzoutdesc{i}": text for i, text in enumerate(self.output_descriptions)}
        for i, field in enumerate(self.outputs):
            named[f"zzout{i}"] = field.name
            named |= {f"zzopt{i}{j}": option for j, option in enumerate(field.options)}
        return named

    def default_objective(self) -> str:
        """Return DSPy's instructions for a signature given as a string; ChainOfThought adds its field later."""
        outputs = [field.name for field in self.outputs if field.name != "reasoning"]
        quoted = [", ".join(f"`{name}`" for name in names) for names in (self.inputs, outputs)]
        return f"Given the fields {quoted[0]}, produce the fields {quoted[1]}."


@dataclass(frozen=True)
class Example:
    """Values of the inputs and of the outputs, in the signature's order. An output may be missing (None)."""

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    detail: str = ""


def chat_value(value: Any) -> str:
    """Return a value in ChatAdapter's reply."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)


def chat_reply(signature: Signature, values: tuple[Any, ...], *, end: str = "\n") -> str:
    """ChatAdapter's assistant turn."""
    blocks = [
        f"[[ ## {field.name} ## ]]\n{_NOT_SUPPLIED if value is None else chat_value(value)}"
        for field, value in zip(signature.outputs, values, strict=True)
    ]
    blocks = [block if i < len(blocks) - 1 else block.rstrip() for i, block in enumerate(blocks)]
    return "\n\n".join(blocks) + "\n\n[[ ## completed ## ]]" + end


def json_reply(signature: Signature, values: tuple[Any, ...]) -> str:
    """JSONAdapter's assistant turn."""
    named = {f.name: _NOT_SUPPLIED if v is None else v for f, v in zip(signature.outputs, values, strict=True)}
    return json.dumps(named, indent=2, ensure_ascii=False)


def prompt(make: Maker, adapter: str, signature: Signature, demos: list[Example], request: Example) -> list[Message]:
    """Return the adapter's messages, as its `format` gives them (incomplete demos come first)."""
    outputs = tuple(field.kind for field in signature.outputs)
    described = bool(signature.input_descriptions)
    template = make.wires.dspy[dspy_key(adapter, len(signature.inputs), outputs, described)]
    names = signature.names
    messages: list[Message] = [{"role": "system", "content": fill(template["system"], names)}]
    for demo in sorted(demos, key=lambda d: None not in d.outputs):
        text = fill(template["demo"], names | {f"zzval{i}": value for i, value in enumerate(demo.inputs)})
        messages.append(user((_INCOMPLETE if None in demo.outputs else "") + text))
        reply = chat_reply if adapter == "chat" else json_reply
        messages.append(assistant(reply(signature, demo.outputs)))
    values = {f"zzval{i}": value for i, value in enumerate(request.inputs)}
    return [*messages, user(fill(template["request"], names | values))]


def _kind_of(make: Maker, attribute: Attribute) -> Field:
    name = make.rng.choice(attribute.fields)
    if attribute.pool and attribute.type == "str" and make.chance(0.35):
        options = tuple(make.rng.sample(attribute.pool, min(len(attribute.pool), make.rng.choice((2, 3, 4, 5)))))
        return Field(name, f"lit{len(options)}", options)
    return Field(name, attribute.type)


def _descriptions(make: Maker, signature: Signature, attributes: list[Attribute | None]) -> Signature:
    if not make.chance(0.3):
        return signature
    inputs = tuple(
        make.rng.choice(("the text to read", "facts about people", "what is asked", "given by the user"))
        for _ in signature.inputs
    )
    outputs = tuple(
        make.rng.choice(("the {label}", "{label} of the person", "only the {label}")).format(label=a.label)
        if a
        else make.rng.choice(("often between 1 and 5 words", "a short answer", "taken from the text"))
        for a in attributes
    )
    return Signature(signature.inputs, signature.outputs, signature.objective, inputs, outputs)


def _objective(make: Maker, signature: Signature) -> Signature:
    objective = make.rng.choice(_OBJECTIVES) if make.chance(0.5) else signature.default_objective()
    return Signature(signature.inputs, signature.outputs, objective)


def _question_signature(make: Maker, reasoning: bool) -> tuple[Signature, Any]:
    """passage, question -> answer; the maker of examples goes with it."""
    inputs = [make.rng.choice(_PASSAGE_FIELDS), make.rng.choice(("question", "question", "query"))]
    flip = make.chance(0.15)
    inputs = inputs[::-1] if flip else inputs
    answer = make.rng.choice(("answer", "answer", "answer", "response", "result", "reply", "output"))
    outputs = (Field("reasoning", "str"),) * reasoning + (Field(answer, "str"),)
    signature = _objective(make, Signature(tuple(inputs), outputs, ""))
    signature = _descriptions(make, signature, [None] * len(outputs))
    # a reasoning that finds nothing is learned late, so it is taught more often than it is tested
    unknown = 0.05 if not reasoning else 0.35 if make.split == "train" else 0.12

    def example() -> Example:
        world = make.world()
        passage = make.passage(world)
        question, reply, fact, detail = make.question(world, unknown)
        pair = (question, passage.text) if flip else (passage.text, question)
        thought = f"The text says: {passage.stating(fact)}" if fact else "The text does not say it."
        return Example(pair, ((thought,) if reasoning else ()) + (reply,), detail)

    return signature, example


def _extraction_signature(make: Maker, reasoning: bool) -> tuple[Signature, Any]:
    """text (and a name) -> one to four typed fields of one entity."""
    kind = make.kind()
    named = make.chance(0.6)
    attributes = make.attributes(kind, 4 - reasoning)[: make.rng.choice((1, 1, 2, 2, 3, 4))]
    fields = [_kind_of(make, attribute) for attribute in attributes]
    if not named and len(fields) < 4 - reasoning and make.chance(0.5):
        fields.insert(0, Field(make.rng.choice(("name", "full_name", "entity_name")), "str"))
    outputs = (Field("reasoning", "str"),) * reasoning + tuple(fields)
    kinds = tuple(f.kind for f in outputs)
    inputs = (make.rng.choice(_PASSAGE_FIELDS),) + ((make.rng.choice(_NAME_FIELDS),) if named else ())
    if (
        dspy_key("chat", len(inputs), kinds, False) not in make.wires.dspy
        or len({f.name for f in outputs}) < len(outputs)
        or {f.name for f in outputs} & set(inputs)
    ):
        return _extraction_signature(make, reasoning)
    signature = _objective(make, Signature(inputs, outputs, ""))
    padding: list[Attribute | None] = [None] * (len(outputs) - len(attributes))
    signature = _descriptions(make, signature, [*padding, *attributes])
    among = {a.key: f.options for a, f in zip(attributes, fields[-len(attributes) :], strict=True) if f.options}

    def example() -> Example:
        world = make.world(
            num_entities=make.rng.choice((1, 2, 2, 3)) if named else 1,
            kind=kind,
            attributes=attributes,
            among=among,
            num_facts=make.rng.choice((len(attributes), 5, 6)),
        )
        passage = make.passage(world)
        entity = make.rng.choice(world.entities)
        values: list[Any] = [entity.facts[a.key].value for a in attributes]
        if len(fields) > len(attributes):
            values.insert(0, entity.name)
        if reasoning:
            stated = dict.fromkeys(passage.stating(entity.facts[a.key]) for a in attributes)
            values.insert(0, " ".join(["The text says:", *stated]))
        return Example((passage.text, entity.name)[: len(inputs)], tuple(values), make.rng.choice(attributes).key)

    return signature, example


def _claim_signature(make: Maker) -> tuple[Signature, Any]:
    """passage, claim -> supported: bool."""
    inputs = (make.rng.choice(_PASSAGE_FIELDS), make.rng.choice(("claim", "statement", "assertion")))
    name = make.rng.choice(("supported", "is_true", "correct", "faithful", "verdict"))
    signature = _descriptions(make, _objective(make, Signature(inputs, (Field(name, "bool"),), "")), [None])

    def example() -> Example:
        world = make.world(num_entities=make.rng.choice((1, 2, 3)))
        statement, truth = false_or_true(make, world)
        return Example((make.passage(world).text, statement), (truth,), "claim")

    return signature, example


def _signature(make: Maker, reasoning: bool = False) -> tuple[Signature, Any]:
    dice = make.rng.random()
    if dice < 0.4:
        return _question_signature(make, reasoning)
    if dice < 0.93 or reasoning:
        return _extraction_signature(make, reasoning)
    return _claim_signature(make)


def _forced(signature: Signature, values: tuple[Any, ...]) -> Parts:
    """Return the reply under a forced scaffold: only values, and the newline after them, are the model's."""
    parts: list[tuple[str, bool]] = []
    for field, value in zip(signature.outputs, values, strict=True):
        parts += [(f"[[ ## {field.name} ## ]]\n", False), (chat_value(value) + "\n", True), ("\n", False)]
    return [*parts, ("[[ ## completed ## ]]\n", False)]


def _document(make: Maker, family: str, adapter: str, reasoning: bool = False) -> Document:
    signature, example = _signature(make, reasoning)
    demos = [example() for _ in range(make.rng.choice((0, 0, 0, 1, 2, 3)))]
    if reasoning and make.chance(0.3):
        demos = [Example(d.inputs, (None, *d.outputs[1:]), d.detail) for d in demos]
    request = example()
    messages = prompt(make, adapter, signature, demos, request)
    answer: Parts
    if adapter == "json":
        answer = json_reply(signature, request.outputs)
    elif make.chance(0.25):
        answer = _forced(signature, request.outputs)
    else:
        answer = chat_reply(signature, request.outputs)
    whole = all(None not in demo.outputs for demo in demos)  # a demo without its reasoning is not to be imitated
    return chat(family, messages, answer, detail=request.detail, learn_history=whole)


def chat_adapter(make: Maker) -> Document:
    return _document(make, "DSPy ChatAdapter", "chat")


def json_adapter(make: Maker) -> Document:
    return _document(make, "DSPy JSONAdapter", "json")


def chain_of_thought(make: Maker) -> Document:
    return _document(make, "DSPy ChainOfThought", "json" if make.chance(0.2) else "chat", reasoning=True)


@dataclass(frozen=True)
class _Tool:
    name: str
    about: str
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]


def _react_tools(make: Maker) -> list[_Tool]:
    keys = list(make.wires.react)
    tools = []
    for t, kinds in enumerate(make.rng.choice(keys).split("|")):
        split = tuple(kinds.split(","))
        base = make.rng.choice(("lookup", "search", "get", "find", "fetch", "query", "ask", "read", "load"))
        name = f"{base}_{make.rng.choice(('person', 'record', 'facts', 'data', 'info', 'city', 'file', 'entry'))}"
        name = name if t == 0 else f"{name}_{make.names.word()}"
        words = make.rng.sample(("name", "key", "topic", "item", "field", "title", "place", "label"), len(split))
        words = [word if kind == "str" else f"num_{word}" for word, kind in zip(words, split, strict=True)]
        tools.append(_Tool(name, f"{base.capitalize()} by {' and '.join(words)}", tuple(words), split))
    return tools


def _step(index: int, thought: str, tool: str, arguments: str, observation: str) -> str:
    """Return one episode of the trajectory, as ReAct formats it."""
    named = {"thought": thought, "tool_name": tool, "tool_args": arguments, "observation": observation}
    return "\n\n".join(f"[[ ## {name}_{index} ## ]]\n{value}" for name, value in named.items())


def react(make: Maker) -> Document:
    """dspy.ReAct: a tool call, a finish, or the final extraction from the trajectory."""
    tools = _react_tools(make)
    template = make.wires.react[react_key(tuple(t.kinds for t in tools))]
    question_field, answer_field = "question", make.rng.choice(("answer", "answer", "result"))
    names = {"zzin0": question_field, "zzout0": answer_field}
    for t, tool in enumerate(tools):
        names |= {f"zztool{t}": tool.name, f"zzabout{t}": tool.about}
        names |= {f"zzarg{t}{i}": argument for i, argument in enumerate(tool.arguments)}
    tool = make.rng.choice(tools)
    entity = make.rng.choice(make.world(num_entities=1).entities)
    fact = make.one_of(entity)
    question = fact.attribute.question(make.rng, entity.name)
    by_name = [t for t in tools if t.kinds == ("str",)]
    values: dict[str, Any] = {}
    if len(by_name) == 1 and make.chance(0.7):
        tool = by_name[0]
        values[tool.arguments[0]] = entity.name
    else:
        for argument, kind in zip(tool.arguments, tool.kinds, strict=True):
            values[argument] = make.rng.randint(0, 999) if kind == "int" else make.names.person()
    asked = ", ".join(f"{argument} {value}" for argument, value in values.items())
    if values.get(tool.arguments[0]) != entity.name:
        question = f"Use {tool.name} with {asked}. {question}"
    thought = f"I should use {tool.name} with {asked}."
    call = json.dumps(values, ensure_ascii=False)
    observation = fact.attribute.sentence(make.rng, entity.name, fact.value)
    trajectory = _step(0, thought, tool.name, call, observation)
    done = "\n\n" + _step(1, "I know the answer.", "finish", "{}", "Completed.")
    stage = make.rng.choice(("call", "call", "finish", "answer"))
    step = "final_" if stage == "answer" else ""
    so_far = {"call": "", "finish": trajectory, "answer": trajectory + done}[stage]
    messages = [
        {"role": "system", "content": fill(template[step + "system"], names)},
        user(fill(template[step + "request"], names | {"zzval0": question, "zzval1": so_far})),
    ]
    if stage == "answer":
        fields = [("reasoning", f"The tool says: {observation}"), (answer_field, fact.answer)]
    else:
        action = (thought, tool.name, call) if stage == "call" else ("I know the answer.", "finish", "{}")
        fields = list(zip(("next_thought", "next_tool_name", "next_tool_args"), action, strict=True))
    answer = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields) + "[[ ## completed ## ]]\n"
    return chat("DSPy ReAct", messages, answer, detail=stage)
