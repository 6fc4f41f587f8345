"""The embedded model answers, under plain transformers, and is scored as it generates."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from bench.sprout.document import chat, plain
from bench.sprout.evaluate import Row, agreement, generate, load
from bench.sprout.maker import user
from bench.sprout.world import make_world
from graftlm.core.model.embedded import sprout_folder


@pytest.fixture(scope="module")
def sprout() -> tuple[Any, Any]:
    return load(sprout_folder(), torch.float32, "cpu")


def written(sprout: tuple[Any, Any], messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    model, tokenizer = sprout
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**given, max_new_tokens=60)
    return str(tokenizer.decode(output[0, given.input_ids.shape[1] :], skip_special_tokens=True))


def test_facts_about_held_out_names_are_found(sprout: tuple[Any, Any]) -> None:
    right = total = 0
    rng = random.Random(11)
    while total < 12:
        world = make_world(rng, "test")
        fact = rng.choice(world.facts)
        question = fact.attribute.question(rng, fact.subject.name)
        right += written(sprout, [user(f"{world.passage().text}\n\n{question}")]) == fact.answer
        total += 1
    assert right >= 11


def test_a_tool_is_called_unforced_and_its_result_becomes_the_answer(sprout: tuple[Any, Any]) -> None:
    parameters = {"properties": {"location": {"type": "string"}}, "required": ["location"], "type": "object"}
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "description": "Get the weather at a location.", "parameters": parameters},
    }
    asked = [user("What is the weather in San Francisco, CA?")]
    text = written(sprout, asked, [tool])
    assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call == {"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "It's sunny."},
    ]
    assert written(sprout, asked + turns, [tool]) == "It's sunny."


def test_forced_text_is_given_and_only_the_rest_is_scored(sprout: tuple[Any, Any]) -> None:
    model, tokenizer = sprout
    text = "Tarel lives in Mosk. Tarel keeps a goat at home.\n\nTarel\n"
    parts = [("City: ", False), ("Mosk\n", True), ("Pet: ", False), ("goat\n", True)]
    right = plain("x", [(text, False), *parts], scored_from=1)
    wrong = plain("x", [(text, False), *parts[:3], ("swan\n", True)], scored_from=1)
    rows = [Row.of(tokenizer.backend_tokenizer, document) for document in (right, wrong)]
    generate(model, rows, tokenizer.pad_token_id)
    assert [row.right for row in rows] == [True, False]
    assert tokenizer.decode(rows[0].written).startswith("City: Mosk\nPet: goat\n")


def test_batched_scoring_writes_what_generate_writes_alone(sprout: tuple[Any, Any]) -> None:
    model, tokenizer = sprout
    asked = ["Hello!", "Tarel is a baker.\n\nWhat does Tarel work as?", "What is 17 + 25?"]
    texts = [written(sprout, [user(text)]) for text in asked]
    rows = [Row.of(tokenizer.backend_tokenizer, chat("x", [user(a)], t)) for a, t in zip(asked, texts, strict=True)]
    generate(model, rows, tokenizer.pad_token_id)
    assert all(row.right for row in rows)


def test_a_fact_3000_tokens_back_is_found(sprout: tuple[Any, Any]) -> None:
    model, tokenizer = sprout
    rng = random.Random(5)
    first = make_world(rng, "test")
    fact = rng.choice(first.facts)
    later = ""
    while len(tokenizer(later).input_ids) < 3_000:
        later += " " + make_world(rng, "test").passage().text
    asked = f"{first.passage().text}{later}\n\n{fact.attribute.question(rng, fact.subject.name)}"
    assert written(sprout, [user(asked)]) == fact.answer


def test_agreement_is_the_share_of_equal_answers() -> None:
    first, second = (
        [Row(plain("x", [("a", True)]), [], [], written) for written in runs]
        for runs in ([[1], [2], [3], [4]], [[1], [2], [9], [4]])
    )
    assert agreement(first, second) == 0.75


def test_the_context_is_4096_tokens_and_the_answers_end(sprout: tuple[Any, Any]) -> None:
    model, tokenizer = sprout
    assert model.config.max_position_embeddings == 4096
    assert set(model.generation_config.eos_token_id) == {tokenizer.eos_token_id, tokenizer.pad_token_id}
