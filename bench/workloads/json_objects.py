"""JSON decoding: objects of several fields, from short texts (character) and longer ones (document), under a schema."""

import json
import random

import graftlm as gl
from bench.workloads import _world as world

max_tokens = 96


def _objects(seed, number, **options):
    found = []
    for made in world.worlds(seed, number, **options):
        entity = made.entities[0]
        facts = [fact for fact in entity.facts.values() if fact.attribute.type in ("str", "int")][:4]
        obj = {"name": entity.name} | {fact.attribute.fields[0]: fact.value for fact in facts}
        found.append({"text": made.passage().text, "name": entity.name, "answer": obj})
    return [one for one in found if len(one["answer"]) > 1]


def inputs():
    """Build characters (texts about one person) or documents (texts about five)."""
    several = _objects(80, world.count(12), num_entities=1, num_facts=5)
    several += _objects(81, world.count(12), num_entities=5)
    random.Random(8).shuffle(several)
    return several


def warm_up():
    return [
        {"text": "The job of Ada Holt is baker.", "name": "Ada Holt", "answer": {"name": "Ada Holt", "job": "baker"}}
    ]


def _schema(answer):
    kinds = {key: {"type": "integer"} if isinstance(value, int) else {"type": "string", "maxLength": 40}
             for key, value in answer.items()}  # fmt: skip
    return {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}


def _prompt(one):
    return f"{one['text']}\n\n{one['name']} as JSON: "


@gl.program(temperature=0)
def _write(s, prompt, schema):
    s += prompt + gl.gen("object", json_schema=schema, max_tokens=96)


def run_native(llm, inputs):
    asked = [{"prompt": _prompt(one), "schema": _schema(one["answer"])} for one in inputs]
    return [json.loads(state["object"]) for state in _write.batch(asked, runtime=llm)]


def run_guidance(llm, inputs):
    from guidance import json as gen_json

    written = [(llm + _prompt(one) + gen_json("object", schema=_schema(one["answer"])))["object"] for one in inputs]
    return [json.loads(text) for text in written]


def run_langchain(llm, inputs):
    """Asked for in words and parsed: the form that every chat class can do."""
    from langchain_core.output_parsers import JsonOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    prompt = ChatPromptTemplate.from_template("{text}\n\nDescribe {name} as JSON with the keys {keys}.")
    chain = prompt | llm | JsonOutputParser()
    asked = [{"text": o["text"], "name": o["name"], "keys": ", ".join(o["answer"])} for o in inputs]
    return [one if isinstance(one, dict) else str(one) for one in chain.batch(asked, return_exceptions=True)]


def right(item, answer):
    return answer == item["answer"]
