"""Thinking: markers are learned from the chat template, texts are split, constraints begin behind the thinking."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

import graftlm as gl
from graftlm.adapters.server import Server, ServerSettings
from graftlm.core.chat import thinking
from graftlm.core.chat.thinking import ThinkingFormat, ThinkingReader, learn_thinking, split_thinking
from graftlm.core.chat.thinking_matcher import ThinkingGrammar
from graftlm.core.chat.tool_parser import AnswerReader, parse_completion
from graftlm.core.constraint import vocabulary_of
from graftlm.core.grammar.compile import Grammar
from graftlm.core.grammar.spec import Choices
from graftlm.core.request import Chunk, Completion, Usage
from graftlm.core.text.tokenizer import Tokenizer

INSIDE = ThinkingFormat("<think>", "</think>", starts="inside")
BEFORE = ThinkingFormat("<think>", "</think>")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEMPLATE = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}[
{{ m.reasoning_content }}
]

{% endif %}{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}[

]

{% elif opens is not defined %}[
{% endif %}{% endif -%}"""
"""A template in the form of Qwen3's, with markers that are single tokens of sprout's vocabulary."""


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    before = list(thinking._MARKERS)
    thinking.register_markers("[", "]")
    hf = copy.deepcopy(gl.Runtime.shared("sprout", dtype="float32").tokenizer.complete)
    hf.chat_template = TEMPLATE
    yield Tokenizer(hf, eos_token_ids=gl.Runtime.shared("sprout", dtype="float32").tokenizer.eos_token_ids)
    thinking._MARKERS[:] = before


@pytest.mark.parametrize(
    ("form", "text", "thought", "content"),
    [
        (INSIDE, "\nTwo and two.\n</think>\n\nFour.", "Two and two.", "Four."),
        (INSIDE, "</think>\n\nFour.", "", "Four."),
        (INSIDE, "cut in the middle </thi", "cut in the middle </thi", ""),
        (BEFORE, "<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
        (BEFORE, "Four. <think> is a word", "", "Four. <think> is a word"),
        (BEFORE, "<thin", "", "<thin"),
        (ThinkingFormat("<think>", "</think>", starts="after"), "Four.", "", "Four."),
    ],
)
def test_a_text_is_split_the_same_whole_and_in_any_pieces(
    form: ThinkingFormat, text: str, thought: str, content: str
) -> None:
    assert split_thinking(form, text) == (thought, content)
    for size in (1, 2, 5):
        reader = ThinkingReader(form)
        pieces = [reader.push(text[i : i + size]) for i in range(0, len(text), size)] + [reader.finish()]
        assert ("".join(t for t, _ in pieces), "".join(c for _, c in pieces)) == (thought, content)


def test_an_answer_is_split_before_its_calls_are_read() -> None:
    done = Completion("a</think>b", [], "stop", Usage())
    parsed = parse_completion(None, done, INSIDE)
    assert (parsed.thinking, parsed.content) == ("a", "b")
    reader = AnswerReader(None, INSIDE)
    assert [delta.text for delta in reader.read(Chunk("a</think>b", [], finish_reason="stop"))] == ["b"]
    assert reader.thought == "a"


def test_the_format_is_learned_for_each_choice_of_options(tokenizer: Tokenizer) -> None:
    learn = learn_thinking
    assert learn(tokenizer) == ThinkingFormat("[", "]", "\n\n", "inside")
    assert learn(tokenizer, {"enable_thinking": False}) == ThinkingFormat("[", "]", "\n\n", "after")
    assert learn(tokenizer, {"opens": False}) == ThinkingFormat("[", "]", "\n\n", "before")
    hf = copy.deepcopy(tokenizer.hf)
    hf.chat_template = "{{ messages }}"
    assert learn(Tokenizer(hf)) is None


def test_markers_that_are_special_tokens_are_named(tokenizer: Tokenizer) -> None:
    hf = copy.deepcopy(tokenizer.hf)
    hf.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    hf.chat_template = TEMPLATE.replace("[", "<think>").replace("]", "</think>")
    found = learn_thinking(Tokenizer(hf))
    assert found == ThinkingFormat("<think>", "</think>", starts="inside", special=("<think>", "</think>"))


class _Walk:
    """A matcher that is advanced by texts."""

    def __init__(self, tokenizer: Tokenizer, starts: str, budget: int | None = None) -> None:
        self.tokenizer = tokenizer
        form = ThinkingFormat("[", "]", "\n\n", starts)  # type: ignore[arg-type]
        rule = form.rule(tokenizer, budget, has_header=False)
        assert rule is not None
        inner = Grammar.compile(Choices(["Oslo", "Rome"]), vocabulary_of(tokenizer))
        self.matcher = ThinkingGrammar(rule, inner).matcher()

    def allowed(self) -> set[int]:
        row = np.zeros((self.tokenizer.vocab_size + 31) // 32, np.int32)
        if not self.matcher.fill_mask(row):
            return set(range(self.tokenizer.vocab_size))
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.tokenizer.vocab_size]
        return set(np.flatnonzero(bits).tolist())

    def id(self, text: str) -> int:
        (one,) = self.tokenizer.encode_continuation(text)
        return one


def test_all_but_an_end_is_allowed_inside_and_the_constraint_behind(tokenizer: Tokenizer) -> None:
    walk = _Walk(tokenizer, "inside")
    matcher, everything = walk.matcher, set(range(tokenizer.vocab_size))
    assert walk.allowed() == everything - set(tokenizer.eos_token_ids)
    assert not matcher.accepting
    thought = tokenizer.encode_continuation("Rome, no: Oslo.")
    assert matcher.advance(thought) == len(thought)
    assert matcher.advance([walk.id("]")]) == 1
    separator = tokenizer.encode_continuation("\n\n")
    assert matcher.forced([]) == separator
    assert matcher.advance(separator) == len(separator)
    inside_choice = walk.allowed()
    assert inside_choice < everything
    words = tokenizer.encode_continuation("Oslo")
    assert words[0] in inside_choice
    assert matcher.advance(words) == len(words)
    assert matcher.finished


def test_a_rollback_goes_through_all_parts(tokenizer: Tokenizer) -> None:
    for starts, before in (("inside", "no ]\n\n"), ("before", "[no]\n\n"), ("before", "")):
        walk = _Walk(tokenizer, starts)
        head = [
            i
            for part in before.replace("[", "|[|").replace("]", "|]|").split("|")
            for i in tokenizer.encode_continuation(part)
        ]
        ids = [*head, *tokenizer.encode_continuation("Oslo")]
        seen = []
        for token_id in ids:
            seen.append(walk.allowed())
            assert walk.matcher.advance([token_id]) == 1
        copy_ = walk.matcher.fork()
        for count in range(1, len(ids) + 1):
            copy_.rollback(1)
            row = _Walk.allowed(type("W", (), {"matcher": copy_, "tokenizer": tokenizer})())  # type: ignore[arg-type]
            assert row == seen[len(ids) - count]
        walk.matcher.rollback(len(ids))
        assert walk.allowed() == seen[0]
        with pytest.raises(ValueError, match="fewer were consumed"):
            walk.matcher.rollback(1)


def test_a_spent_budget_forces_the_end_of_the_thinking(tokenizer: Tokenizer) -> None:
    walk = _Walk(tokenizer, "inside", budget=3)
    walk.matcher.advance(tokenizer.encode_continuation("a b c")[:3])
    end = walk.id("]")
    assert walk.allowed() == {end}
    assert walk.matcher.forced([])[0] == end
    assert _Walk(tokenizer, "inside", budget=0).allowed() == {end}
    no_thinking = _Walk(tokenizer, "before", budget=0)
    assert walk.id("[") not in no_thinking.allowed()


def test_the_shortest_ending_leaves_the_thinking_first(tokenizer: Tokenizer) -> None:
    matcher = _Walk(tokenizer, "inside").matcher
    ending = matcher.ending([])
    assert len(ending) <= matcher.min_tokens_to_accept()
    assert tokenizer.decode(ending) in ("]\n\nOslo", "]\n\nRome")
    assert matcher.advance(ending) == len(ending)
    assert matcher.accepting


@pytest.fixture(scope="module")
def runtime(tokenizer: Tokenizer) -> Iterator[gl.Runtime]:
    with gl.Runtime("sprout", tokenizer=tokenizer.hf, dtype="float32") as runtime:
        yield runtime.load()


async def ask(
    runtime: gl.Runtime, path: str = "/v1/chat/completions", status: int = 200, **given: Any
) -> httpx.Response:
    server = Server(runtime, ServerSettings(model_names=("sprout",)))
    body = {"messages": [{"role": "user", "content": "Mara is 20."}], "temperature": 0, "max_tokens": 60, **given}
    transport = httpx.ASGITransport(server)
    async with server._lifespan(None), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:  # type: ignore[arg-type]
        answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer


async def test_a_schema_holds_behind_the_thinking(runtime: gl.Runtime) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    answer = (await ask(runtime, response_format=format_, thinking_budget=5)).json()["choices"][0]["message"]
    assert set(json.loads(answer["content"])) == {"name", "age"}
    assert answer["reasoning_content"]
    whole = (await ask(runtime, response_format=format_, thinking_budget=5, separate_reasoning=False)).json()
    assert set(json.loads(whole["choices"][0]["message"]["content"])) == {"name", "age"}


async def test_a_schema_holds_where_max_tokens_ends_the_thinking(runtime: gl.Runtime) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    answer = (await ask(runtime, response_format=format_, max_tokens=40)).json()["choices"][0]
    assert set(json.loads(answer["message"]["content"])) == {"name", "age"}


async def test_thinking_is_switched_off_in_the_prompt(runtime: gl.Runtime) -> None:
    answer = (await ask(runtime, chat_template_kwargs={"enable_thinking": False})).json()["choices"][0]["message"]
    assert answer["reasoning_content"] is None
    text = runtime.tokenizer.render([{"role": "user", "content": "Mara is 20."}], options={"enable_thinking": False})
    assert answer["content"] == runtime.generate(text, temperature=0, max_tokens=60).text
    refused = await ask(runtime, status=400, chat_template_kwargs={"tokenize": True})
    assert refused.json()["error"]["param"] == "chat_template_kwargs.tokenize"


async def test_a_stream_and_the_other_dialects_tell_thinking_apart(runtime: gl.Runtime) -> None:
    whole = (await ask(runtime, thinking_budget=6)).json()["choices"][0]["message"]
    text = (await ask(runtime, thinking_budget=6, stream=True)).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]

    given: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 6}}
    blocks = (await ask(runtime, "/v1/messages", **given)).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == (whole["reasoning_content"], whole["content"])
    streamed = (await ask(runtime, "/v1/messages", stream=True, **given)).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(piece.get("thinking", "") for piece in pieces) == whole["reasoning_content"]
    assert "".join(piece.get("text", "") for piece in pieces) == whole["content"]
    started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert started == ["thinking", "text"]


async def test_thinking_of_earlier_turns_is_rendered(runtime: gl.Runtime) -> None:
    turns = [
        {"role": "user", "content": "Mara is 20."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It says so."},
        {"role": "user", "content": "How old?"},
    ]
    counted = (await ask(runtime, messages=turns)).json()["usage"]["prompt_tokens"]
    assert counted == len(runtime.tokenizer.encode(runtime.tokenizer.render(turns)))
    assert "It says so." in runtime.tokenizer.render(turns)
