from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError
from graftlm.core.semantic_cache.wording import marks
from graftlm.testing import ScriptedModel

GREEDY = {"temperature": 0.0, "max_tokens": 8}


def letters(texts: Sequence[str]) -> np.ndarray:
    return np.array([[text.lower().count(one) for one in "abcdefghijklmnopqrstuvwxyz"] for text in texts])


def ask(runtime: Any, text: str, **options: Any) -> gl.Completion:
    return runtime.generate(text, **{**GREEDY, **options})  # type: ignore[no-any-return]


def made(model: ScriptedModel | None = None, **options: Any) -> Any:
    cache = gl.SemanticCache(**{"embedder": letters, **options})
    return (model or ScriptedModel(lambda prompt: f"{len(prompt)}")).runtime(semantic_cache=cache)


def test_a_reworded_prompt_gets_the_earlier_answer_and_says_so() -> None:
    model = ScriptedModel(lambda prompt: f"{len(prompt)}")
    with made(model) as runtime:
        first = ask(runtime, "Rules.\n\nWhat is the job of Mara?")
        second = ask(runtime, "Rules.\n\nplease, what is the job of Mara?")
        assert (first.cached_from, second.cached_from) == (None, "What is the job of Mara?")
        assert second.text == first.text and second.usage == gl.Usage() and 0.9 <= (second.similarity or 0) <= 1
        assert len(model.requests) == 1
        stats = runtime.stats()
        assert (stats.semantic_hits, stats.semantic_misses, stats.semantic_entries) == (1, 1, 1)


@pytest.mark.parametrize(
    "other",
    ["What is not the job of Mara?", "What is the job of Mara 2?", "What is the job of Tom?", "Who is tall?"],
)
def test_near_misses_are_asked_again(other: str) -> None:
    with made() as runtime:
        ask(runtime, "What is the job of Mara?")
        assert ask(runtime, other).cached_from is None


def test_nothing_mixes_contexts_schemas_parameters_or_namespaces() -> None:
    question = "What is the job of Mara?"
    with made() as runtime:
        ask(runtime, question)
        others: list[dict[str, Any]] = [
            {"regex": "[0-9]+"},
            {"json_schema": {"type": "integer"}},
            {"max_tokens": 7},
            {"stop": "x"},
        ]
        assert [ask(runtime, question, **options).cached_from for options in others] == [None] * 4
        assert [ask(runtime, question, **options).cached_from for options in others] == [question] * 4
        assert ask(runtime, "Other rules.\n\n" + question).cached_from is None
        asked = [gl.Request(question, gl.SamplingParams(**GREEDY), namespace=name) for name in ("a", "b", "a")]
        assert [runtime.complete(request).cached_from for request in asked] == [None, None, question]
        messages = [{"role": "user", "content": question}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        requests = [gl.Request(messages, gl.SamplingParams(**GREEDY), tools=given) for given in (None, tools, None)]
        assert [runtime.complete(request).cached_from for request in requests] == [None, None, question]


def test_several_runtimes_may_share_a_cache_and_models_do_not_mix() -> None:
    cache = gl.SemanticCache(embedder=letters)
    one, other = (ScriptedModel(lambda prompt, i=i: f"{i}") for i in range(2))  # type: ignore[misc]
    with one.runtime(semantic_cache=cache) as first, other.runtime(semantic_cache=cache) as second:
        assert [ask(runtime, "Who?").text for runtime in (first, second, first, second)] == ["0", "1", "0", "1"]
        assert len(cache) == 2


def test_only_greedy_requests_unless_asked() -> None:
    for any_temperature, expected in ((False, None), (True, "Who is Mara?")):
        with made(any_temperature=any_temperature) as runtime:
            ask(runtime, "Who is Mara?", temperature=1.0)
            assert ask(runtime, "Who is Mara?", temperature=1.0).cached_from == expected


def test_every_way_to_ask_is_answered() -> None:
    with made() as runtime:
        text = ask(runtime, "Who is Mara?").text
        assert "".join(chunk.text for chunk in runtime.stream("Who is Mara?", **GREEDY)) == text
        assert [one.text for one in runtime.generate(["Who is Mara?", "Who is Mara ?"], **GREEDY)] == [text, text]
        assert asyncio.run(runtime.agenerate("Who is Mara?", **GREEDY)).cached_from == "Who is Mara?"
        assert runtime.stats().requests == 1


def test_messages_of_adapters_are_answered_too() -> None:
    from graftlm.core.chat.messages import Message

    with made() as runtime:
        chats = [[Message("system", "Rules."), Message("user", text)] for text in ("Who is Mara?", "who is Mara")]
        other = [Message("system", "No rules."), Message("user", "Who is Mara?")]
        found = [ask(runtime, chat).cached_from for chat in (*chats, other)]  # type: ignore[arg-type]
        assert found == [None, "Who is Mara?", None]


def test_answers_expire_and_the_oldest_go() -> None:
    with made(ttl_s=0.01) as runtime:
        ask(runtime, "Who is Mara?")
        time.sleep(0.02)
        assert ask(runtime, "Who is Mara?").cached_from is None
    with made(max_entries=1) as runtime:
        for text in ("Who is Mara?", "Who is Tom?"):
            ask(runtime, text)
        assert ask(runtime, "Who is Mara?").cached_from is None


def test_the_model_itself_and_embedding_objects_can_embed() -> None:
    class Embeddings:
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [[float(one) for one in row] for row in letters(texts)]

    for embedder in ("model", Embeddings()):
        with made(embedder=embedder) as runtime:
            ask(runtime, "Who is Mara?")
            assert ask(runtime, "Who is Mara?").cached_from == "Who is Mara?"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"similarity": 1.5}, "similarity is 1.5; it must lie between 0 and 1"),
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"max_entries": 0}, "max_entries is 0"),
        ({"embedder": 3}, "embedder is 3; give 'model', a function"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        made(**options)
    with pytest.raises(ConfigError, match="semantic_cache is 'x'; give gl.SemanticCache"):
        gl.Runtime("sprout", semantic_cache="x")  # type: ignore[arg-type]


def test_an_embedder_of_another_size_is_named() -> None:
    sizes = iter([3, 4])
    with made(embedder=lambda texts: np.ones((len(texts), next(sizes)))) as runtime:
        ask(runtime, "Who is Mara?")
        with pytest.raises(ConfigError, match="returned 4 numbers, the entries of this cache have 3"):
            ask(runtime, "Who is Tom?")
    with made(embedder=lambda texts: [1.0]) as runtime, pytest.raises(ConfigError, match=r"shape \(1,\) for 1 texts"):
        ask(runtime, "Who is Mara?")


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("What is the capital of Peru?", ["Hi! Tell me what the capital of Peru is.", "What is Peru's capital?"]),
        ("How do I sort 5 lists?", ["Could you explain how to sort five lists?", "way to sort 5 lists"]),
        ("Did Mara beat Tom in 1987?", ["In 1987, did Mara beat Tom?"]),
        ("Can Mara cancel it?", ["Is it possible for Mara to cancel it?", "I wonder if Mara can cancel it."]),
        ("Can I freeze eggs?", ["am i allowed to freeze eggs", "Would it be okay to freeze eggs?"]),
        ("Is Oslo larger than Rome?", ["I'd like to know whether Oslo is bigger than Rome."]),
        ("How much does a stamp cost?", ["What is the price of a stamp?"]),
        ("Which is cheaper, rice or tea?", ["Is tea or rice cheaper?"]),
        ("Summarise the report in 5 lines.", ["Please give me a summary of the report in five lines."]),
        ("My phone is wet. What should I do?", ["What should I do? My phone is wet."]),
        ("Did Ana call on March 5?", ["Did Ana call on the 5th of March?"]),
    ],
)  # fmt: skip
def test_wordings_of_one_meaning_agree(text: str, others: list[str]) -> None:
    assert [marks(other) for other in others] == [marks(text)] * len(others)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Did Mara beat Tom?", "Did Tom beat Mara?"),
        ("trains from Oslo to Rome", "trains from Rome to Oslo"),
        ("Which dogs bite?", "What do dogs bite?"),
        ("Why is it red?", "When is it red?"),
        ("Did Mara owe 5 dollars?", "Does Mara owe 5 dollars?"),
        ("Isn't it red?", "Is it red?"),
        ("two cats", "three cats"),
        ("Is Ana able to vote?", "Is Ana allowed to vote?"),
        ("Where do I live?", "Where should I live?"),
        ("Are there few users?", "Are there a few users?"),
        ("What is -5 squared?", "What is 5 squared?"),
        ("What is .5 of 10?", "What is 5 of 10?"),
        ("Is C# fast?", "Is C fast?"),
        ("What does \U0001f34e mean?", "What does \U0001f34a mean?"),
        ("Is US law strict?", "Is our law strict?"),
        ("Translate to French: the dog", "Translate to French: a dog"),
        ('Is "He go to the bed" right?', 'Is "He go to bed" right?'),
        ("What is another word for purchase?", "What is another word for buy?"),
        ("Ana kennt Ben", "Ben kennt Ana"),
        ("What is hepatitis A?", "What is hepatitis?"),
    ],
)
def test_near_misses_have_other_words(one: str, other: str) -> None:
    assert marks(one) != marks(other)


@pytest.mark.parametrize("text", ["", "?", "§", "Thanks!", "hi", "a " * 200, "please " * 50, "what is", ": :", "'s"])
def test_every_text_has_words(text: str) -> None:
    assert isinstance(marks(text), tuple) and marks(text) == marks(text)


def test_a_text_to_be_translated_is_compared_as_it_is_written() -> None:
    with made() as runtime:
        for context, expected in (("Rules.", "Is the dog here?"), ("Translate it into Dutch:", None)):
            ask(runtime, context + "\n\nIs the dog here?")
            assert ask(runtime, context + "\n\nPlease, is the dog here?").cached_from == expected
