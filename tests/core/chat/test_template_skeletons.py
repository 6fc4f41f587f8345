"""What is written from a skeleton is what the template writes; templates that look into contents have none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.chat import template_skeletons
from graftlm.core.chat.messages import Message, ToolCall, to_template_dicts
from graftlm.core.errors import ConfigError
from graftlm.core.text.tokenizer import Tokenizer
from tests import chat_templates
from tests.models import byte_tokenizer

OPAQUE = ("CHATML", "LLAMA_2", "LLAMA_3", "MISTRAL", "GEMMA", "TRIMS", "REWRITES")
TEMPLATES = {name: getattr(chat_templates, name) for name in (*OPAQUE, "THINKS", "ALTERNATE")}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "\u00e9<", "b": [1, 2.0, True, None]}}}]


def tokenizer_with(template: str) -> Tokenizer:
    hf = byte_tokenizer(add_bos=True)
    hf.chat_template = template
    return Tokenizer.from_hf(hf)


def whole(tokenizer: Tokenizer, chat: list[Message], tools: Any, prompt: bool) -> str:
    written: str = tokenizer.hf.apply_chat_template(
        to_template_dicts(chat), tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    return written


def known(tokenizer: Tokenizer, chat: list[Message], tools: Any = None, prompt: bool = True) -> str | None:
    return tokenizer._skeletons.text(chat, tools, prompt)


def chat_of(*contents: str, roles: tuple[str, ...] = ("system", "user", "assistant", "user")) -> list[Message]:
    return [Message(role, content) for role, content in zip(roles, contents, strict=False)]


SHARED = {name: tokenizer_with(template) for name, template in TEMPLATES.items()}
pieces = st.sampled_from(
    ["", " ", "\n", "a", "</think>", "<|im_end|>", "{{ x }}", '"\\<aA \ue001', "\ue0000 ", "\u00e9", "<tool>", "  x  "]
)  # fmt: skip
contents = st.lists(pieces, max_size=5).map("".join)
roles = st.sampled_from(
    [("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user")]
    + [("user", "user"), ("user", "tool", "tool"), ("assistant",), ("system",)]
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(TEMPLATES)), roles, st.data(), st.sampled_from([None, TOOLS]), st.booleans())
def test_messages_are_written_as_the_template_writes_them(
    name: str, turns: tuple[str, ...], data: st.DataObject, tools: Any, prompt: bool
) -> None:
    tokenizer = SHARED[name]  # which has learned from earlier examples
    for _ in range(3):
        chat = [Message(role, data.draw(contents)) for role in turns]
        try:
            expected = whole(tokenizer, chat, tools, prompt)
        except Exception:
            with pytest.raises(ConfigError):
                tokenizer.render(chat, tools, add_generation_prompt=prompt)
        else:
            assert tokenizer.render(chat, tools, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("name", OPAQUE)
def test_a_template_that_looks_into_no_content_is_run_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    for content in ("one", "two"):
        tokenizer.render(chat_of(content, content, content, content), TOOLS)
    chat = chat_of(" a\n", "{{ b }}", "</s>", "d ")
    expected = whole(tokenizer, chat, TOOLS, True)
    monkeypatch.setattr(tokenizer.hf, "apply_chat_template", None)
    assert tokenizer.render(chat, TOOLS) == expected


LOOKS = [
    "{{ c | length }}", "{{ c | upper }}", "{{ c[:2] }}", "{{ c.split('x')[0] }}", "{{ '%5s' % c }}",
    "{{ c | tojson }}",
    "{% if 'x' in c %}1{% endif %}", "{% if c in 'abc' %}1{% endif %}", "{% if c in ['a'] %}1{% endif %}",
    "{% if c == 'x' %}1{% endif %}", "{% if 'x' < c %}1{% endif %}", "{{ c | wordcount }}", "{{ c | int }}",
    "{{ ['y', c] | join }}", "{{ ','.join([c]) }}", "{{ 'abc'.startswith(c) }}", "{{ c | replace('x', 'y') }}",
    "{% set d = 'a' ~ c %}{{ d | length }}", "{% set d %}{{ c }}{% endset %}{{ d | length }}", "{{ c | e }}",
    "{% macro m(x) %}{{ x }}!{% endmacro %}{% if m(c) == 'x!' %}1{% endif %}", "{{ messages | tojson }}",
    "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(c) | title }}", "{% for letter in c %}{{ letter }}-{% endfor %}",
    "{% filter upper %}{{ c }}{% endfilter %}", "{{ {c: 1} }}", "{{ ('a' + c) | length }}", "{{ c * 2 }}",
    "{{ c.strip('x') }}", "{{ c | trim('x') }}", "{{ '{}'.format(c) }}", "{{ 'abc'[c] }}", "{{ loop.changed(c) }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ messages | map(attribute='content') | map('length') | list }}",
    "{{ c if c is eq('x') }}", "{{ c | string | length }}", "{{ c | safe | length }}", "{{ [c] | first | length }}",
    "{{ c | list | length }}", "{{ c.strip() | length }}", "{{ (c + '') | trim }}", "{{ messages | string }}",
]  # fmt: skip


@pytest.mark.parametrize("looks", LOOKS)
def test_a_template_that_looks_into_a_content_is_rendered_whole(looks: str) -> None:
    template = "{% for m in messages %}{% set c = m.content %}" + looks + "{% endfor %}"
    tokenizer = tokenizer_with(template)
    for text in ("x", "axb", "  x ", "x x", "", "upper", "12"):
        chat = chat_of(text, text)
        try:
            expected = whole(tokenizer, chat, None, True)
        except Exception:
            with pytest.raises(ConfigError):
                tokenizer.render(chat)
        else:
            assert tokenizer.render(chat) == expected
        assert known(tokenizer, chat) is None


def test_an_empty_content_has_a_skeleton_of_its_own() -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% if m.content.strip() %}[{{ m.content }}]{% endif %}{% endfor %}"
    )
    for text in ("a", "b", " ", "\n"):
        assert tokenizer.render(chat_of(text)) == (f"[{text}]" if text.strip() else "")
    assert known(tokenizer, chat_of("c")) == "[c]" and known(tokenizer, chat_of("\t")) == ""


def test_a_text_with_the_day_is_of_that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with(chat_templates.LLAMA_3)
    for _ in range(2):
        tokenizer.render(chat_of("a", "b"))
    assert known(tokenizer, chat_of("c", "d")) is not None

    class Tomorrow:
        @staticmethod
        def now() -> Tomorrow:
            return Tomorrow()

        def strftime(self, pattern: str) -> str:
            return "01 Jan 2100"

    monkeypatch.setattr(template_skeletons, "datetime", Tomorrow)
    assert known(tokenizer, chat_of("c", "d")) is None


def test_a_template_that_is_replaced_is_learned_anew() -> None:
    tokenizer = tokenizer_with(chat_templates.TRIMS)
    for _ in range(2):
        tokenizer.render(chat_of("a"))
    tokenizer.hf.chat_template = "{{ messages[0].content }}"
    for _ in range(3):
        assert tokenizer.render(chat_of("b")) == "b"


def test_messages_with_more_than_a_text_are_rendered_whole() -> None:
    tokenizer = tokenizer_with(chat_templates.TRIMS)
    for message in (
        Message("assistant", "a", tool_calls=(ToolCall("1", "add"),)),
        Message("tool", "a", tool_call_id="1"),
        Message("user", "a", name="Mara"),
    ):
        for _ in range(3):
            tokenizer.render([message])
        assert known(tokenizer, [message]) is None


def test_skeletons_are_dropped_beyond_the_limit() -> None:
    tokenizer = tokenizer_with(chat_templates.TRIMS)
    skeletons = tokenizer._skeletons
    skeletons.max_bytes = 10_000
    for number in range(1, 60):
        for _ in range(2):
            tokenizer.render([Message("user", "a")] * number)
    assert skeletons.num_bytes <= 10_000 and 0 < len(skeletons._known) < 59
    assert known(tokenizer, [Message("user", "b")]) is None
    assert skeletons.num_bytes == sum(template_skeletons._size(key, found) for key, found in skeletons._known.items())
