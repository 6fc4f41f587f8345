"""The micro-world and its documents: splits, determinism, right answers, the model's own formats."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.sprout.attribute import COMMON_ASK, spoken
from bench.sprout.attributes import ATTRIBUTES
from bench.sprout.corpus import ANSWER_WEIGHT, REST_WEIGHT, Corpus, make_block
from bench.sprout.document import Document, chat, plain
from bench.sprout.maker import Maker, json_parts
from bench.sprout.mixture import FAMILIES, cases, documents
from bench.sprout.names import Names, split_of
from bench.sprout.tasks_lists import listing
from bench.sprout.tokenizer import FastEncoder
from bench.sprout.wires import TYPES, Wires, build
from bench.sprout.world import make_world
from graftlm.core.model.embedded import sprout_folder


@pytest.fixture(scope="module")
def wires() -> Wires:
    pytest.importorskip("dspy")
    return Wires(build(combinations=[c for n in (1, 2) for c in itertools.product(TYPES, repeat=n)]))


@pytest.fixture(scope="module")
def some(wires: Wires) -> list[Document]:
    return list(islice(documents("tests", "train", wires), 400))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(sprout_folder())


def held_out_names(rng: random.Random) -> Iterator[str]:
    names = Names(rng, "test")
    while True:
        yield names.invented()


def test_an_invented_name_belongs_to_the_split_it_was_drawn_for() -> None:
    assert {split_of(name) for name in islice(held_out_names(random.Random(0)), 50)} == {"test"}


def test_no_invented_name_of_the_test_split_is_drawn_in_training() -> None:
    train = Names(random.Random(1), "train")
    assert not {train.invented() for _ in range(2000)} & set(islice(held_out_names(random.Random(1)), 2000))


def test_every_attribute_is_said_and_asked_in_several_ways() -> None:
    for attribute in ATTRIBUTES:
        asked = attribute.ask + (COMMON_ASK if attribute.type != "bool" else ())
        assert len(set(attribute.say)) >= 3 and len(set(asked)) >= 2, attribute.key
        assert all("{n}" in text for text in (*attribute.say, *attribute.deny, *attribute.ask)), attribute.key


def test_a_passage_states_every_fact_with_its_value() -> None:
    for seed in range(50):
        world = make_world(random.Random(seed), "test")
        passage = world.passage()
        assert set(map(id, passage.facts)) == set(map(id, world.facts))
        for fact in world.facts:
            if fact.attribute.type in ("str", "int"):
                assert spoken(fact.value) in passage.stating(fact)


def test_the_same_seed_gives_the_same_documents_and_another_seed_others(wires: Wires) -> None:
    first, again, other = (list(islice(documents(s, "train", wires), 20)) for s in ("a", "a", "b"))
    assert first == again != other


def test_every_family_has_cases_with_an_answer(wires: Wires) -> None:
    for family in FAMILIES:
        found = cases(family, 3, wires)
        assert [document.family for document in found] == [family] * 3
        assert all(document.answer and document.prompt for document in found)


def test_a_chat_document_is_what_the_shipped_chat_template_renders(tokenizer: Any) -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 3, "b": 'é"x', "c": [True]}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "q"},
    ]
    for given in (messages, messages[1:]):
        for offered in ([], tools):
            text = tokenizer.apply_chat_template(
                given, tools=offered or None, tokenize=False, add_generation_prompt=True
            )
            assert chat("x", given, "A", tools=offered).prompt == text


def test_the_chat_template_joins_text_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert text == "<|im_start|>user\none two<|im_end|>\n"


def test_a_name_is_the_same_tokens_after_a_space_a_quote_and_a_newline(tokenizer: Any) -> None:
    def inside(before: str, after: str) -> list[str]:
        ids = tokenizer(f"{before}Vorlath{after}", add_special_tokens=False).input_ids
        return tokenizer.convert_ids_to_tokens(ids)[1:-1]

    assert inside(" ", ".") == inside('"', '"') == inside("\n", "\n") == inside("(", ",")


def test_the_fast_encoder_and_segment_boundaries_agree_with_the_tokenizer(some: list[Document], tokenizer: Any) -> None:
    fast = FastEncoder(tokenizer.backend_tokenizer)
    for document in some:
        ids = tokenizer(document.text, add_special_tokens=False).input_ids
        assert fast.encode(document.text) == ids == fast.document(document, 1, 0)[0]


def test_only_what_the_model_writes_has_the_answer_weight(tokenizer: Any) -> None:
    document = plain("x", [("Name: ", False), ("Tarel\n", True)])
    ids, weights = FastEncoder(tokenizer.backend_tokenizer).document(document, ANSWER_WEIGHT, REST_WEIGHT)
    learned = [i for i, weight in zip(ids, weights, strict=True) if weight == ANSWER_WEIGHT]
    assert tokenizer.decode(learned) == "Tarel\n<|endoftext|>"


def test_forced_json_leaves_values_to_the_model_and_gives_the_rest() -> None:
    parts = json_parts({"name": "Tarel", "age": 40, "ok": True, "tags": ["a", "b"], "pet": None}, learn_keys=False)
    assert isinstance(parts, list)
    assert "".join(text for text, _ in parts) == '{"name":"Tarel","age":40,"ok":true,"tags":["a","b"],"pet":null}'
    assert [text for text, learned in parts if learned] == ['Tarel"', "40", "true", 'a","b"]', "null"]


def test_a_block_is_full_of_whole_documents_and_repeats_for_the_same_index(wires: Wires, tokenizer: Any) -> None:
    fast = FastEncoder(tokenizer.backend_tokenizer)
    block, again = (make_block(1, 5, 4000, 4096, fast, wires) for _ in range(2))
    assert len(block.tokens) == len(block.weights) == block.starts[-1] == 4000
    assert (block.tokens == again.tokens).all() and (block.starts == again.starts).all()
    positions = block.positions()
    assert (positions[block.starts[:-1]] == 0).all()
    assert positions.max() == np.diff(block.starts).max() - 1
    assert len(block.padded_starts()) == 769 and block.padded_starts()[-1] == 4000


def test_a_corpus_that_begins_later_serves_the_blocks_of_one_that_began_before(
    wires: Wires, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "wires.json"
    path.write_text(json.dumps(wires.data), encoding="utf-8")
    fast = FastEncoder(tokenizer.backend_tokenizer)
    corpus = Corpus(
        tokenizer.backend_tokenizer.to_str(),
        seed=1,
        num_tokens=2000,
        context=4096,
        num_workers=2,
        first=3,
        wires_path=path,
    )
    try:
        for index, block in zip((3, 4, 5), corpus, strict=False):
            assert (block.tokens == make_block(1, index, 2000, 4096, fast, wires).tokens).all()
    finally:
        corpus.close()


def test_unanswerable_questions_and_lists_over_five_subjects_are_among_the_held_out_cases(wires: Wires) -> None:
    reasoned = cases("DSPy ChainOfThought", 150, wires)
    assert 3 <= sum("The text does not say it." in document.answer for document in reasoned) <= 25
    named = [d for d in cases("lists and summaries", 60, wires) if d.detail == "names"]
    assert max(len(document.answer.split(", ")) for document in named) == 5


def test_a_lesson_on_lists_never_asks_for_the_same_list_twice(wires: Wires) -> None:
    make = Maker(random.Random(3), "train", wires)
    for _ in range(40):
        answers = [segment.text for segment in listing(make).segments if segment.learned]
        assert len(set(answers)) == len(answers)


def test_a_far_fact_stands_three_thousand_tokens_before_its_question_and_fits_the_context(
    wires: Wires, tokenizer: Any
) -> None:
    fast = FastEncoder(tokenizer.backend_tokenizer)
    for document in cases("3,000 tokens back", 10, wires):
        assert len(fast.encode(document.text)) <= 4096
        value = document.answer.removesuffix("<|im_end|>").split(", ")[0]
        if value not in ("yes", "no"):
            assert len(fast.encode(document.prompt[document.prompt.index(value) :])) > 3000


def test_far_passages_are_drawn_only_where_they_are_asked_for(wires: Wires) -> None:
    without, some = (
        {document.family for document in islice(documents("far", "train", wires, far), 60)} for far in (0.0, 40.0)
    )
    assert "3,000 tokens back" in some - without
