"""Structured output: a record out of each of 64 passages, beside the chains that LangChain documents for local models.

Both sides get the same messages. The baselines have to be told the schema and parse what comes; GraftLM keeps to it
by a grammar. Three ways of asking, which differ in how much the prompts share: the parser's format instructions (what
LangChain documents), worked examples, and the names of the fields alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import PydanticOutputParser
from pydantic import BaseModel
from transformers import PreTrainedModel

from bench.frameworks._transformers import chat_pipeline, fastest_text_pipeline, rendered, same_weights
from bench.harness import Options, Row, paired, rate_row
from bench.sprout.attributes import BY_KIND
from bench.sprout.world import make_world
from graftlm import Runtime
from graftlm.adapters.langchain import ChatGraftLM

CASE = "langchain_extraction"
MAX_TOKENS = 96
FIELDS = ("age", "job", "city", "hobby")
SYSTEM = "You are an expert extraction algorithm. Only extract relevant information from the text."


class Person(BaseModel):
    """A person in the text."""

    name: str
    age: int
    job: str
    city: str
    hobby: str


Passage = tuple[str, Person]
Answers = list[Any]


def run(options: Options) -> Sequence[Row]:
    count = options.choose(8, 64)
    told = passages(count + 4)
    examples, asked = told[:4], told[4:]
    parser = PydanticOutputParser(pydantic_object=Person)
    shots = [message for text, person in examples for message in (("human", text), ("ai", person.model_dump_json()))]
    keys = ", ".join(Person.model_fields)
    ways: dict[str, Callable[[str], list[tuple[str, str]]]] = {
        "format instructions": lambda text: [
            ("system", f"{SYSTEM}\n{parser.get_format_instructions()}"),
            ("human", text),
        ],
        "four examples": lambda text: [("system", SYSTEM), *shots, ("human", text)],
        "the fields' names": lambda text: [("human", f"{text}\n\nReturn JSON with the keys {keys}.")],
    }
    rows: list[Row] = []
    with same_weights(options) as (runtime, model, tokenizer):
        for way, messages in ways.items():
            chats = [messages(text) for text, _ in asked]
            rows += extraction(runtime, model, tokenizer, way, chats, [person for _, person in asked])
    return rows


def extraction(
    runtime: Runtime,
    theirs: PreTrainedModel,
    tokenizer: Any,
    way: str,
    chats: list[list[tuple[str, str]]],
    expected: list[Person],
) -> list[Row]:
    """Measure one form of prompts; the floor holds where the prompts share their instructions."""
    parser = PydanticOutputParser(pydantic_object=Person)
    ours = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=MAX_TOKENS).with_structured_output(Person)
    prompts = [rendered(tokenizer, chat) for chat in chats]
    text, size = fastest_text_pipeline(theirs, tokenizer, MAX_TOKENS, prompts, min_new_tokens=1)
    chat_model = chat_pipeline(theirs, tokenizer, MAX_TOKENS, min_new_tokens=1)
    answers: dict[str, Answers] = {}

    def graftlm() -> None:
        runtime.clear_cache()
        runtime.reset_stats()
        answers["graftlm"] = ours.batch(chats, return_exceptions=True)

    baselines: dict[str, Callable[[], Answers]] = {
        "ChatHuggingFace": lambda: (chat_model | parser).batch(chats, return_exceptions=True),
        f"HuggingFacePipeline(batch_size={size})": lambda: [_parsed(parser, answer) for answer in text.batch(prompts)],
    }
    what = f"records from {len(chats)} passages, by {way}"
    ours.batch(chats[:2])
    rows: list[Row] = []
    for name, job in baselines.items():

        def baseline(name: str = name, job: Callable[[], Answers] = job) -> None:
            answers[name] = job()

        times = paired({"graftlm": graftlm, name: baseline}, 1, warm=False)
        rows.append(
            rate_row(
                CASE,
                f"{what}, against {name}",
                "passages/s",
                len(chats),
                times["graftlm"],
                times[name],
                floor=10 if name == "ChatHuggingFace" else None,
                shape={"prompt_tokens": runtime.stats().prompt_tokens},
            )
        )
    valid = {name: sum(isinstance(answer, Person) for answer in got) for name, got in answers.items()}
    right = {name: sum(a == b for a, b in zip(got, expected, strict=True)) for name, got in answers.items()}
    stats = runtime.stats()
    return [
        *rows,
        Row(CASE, f"{what}: valid", valid["graftlm"], "passages", valid["ChatHuggingFace"], floor=len(chats)),
        Row(CASE, f"{what}: right", right["graftlm"], "passages", right["ChatHuggingFace"]),
        Row(CASE, f"{what}: prompt tokens computed", stats.computed_tokens, "tokens", stats.prompt_tokens),
    ]


def passages(count: int) -> list[Passage]:
    """Return passages about one distinct person each, with their facts."""
    rng = random.Random(5)
    attributes = [a for key in FIELDS for a in BY_KIND["person"] if a.key == key]
    found: list[Passage] = []
    while len(found) < count:
        world = make_world(rng, "test", kind="person", num_entities=1, attributes=attributes, num_facts=0)
        (person,) = world.entities
        values = {key: person.facts[key].value for key in FIELDS}
        found.append((world.passage().text, Person(name=person.name, **values)))
    return found


def _parsed(parser: PydanticOutputParser[Person], text: str) -> Person | None:
    try:
        return parser.parse(text)
    except OutputParserException:
        return None
