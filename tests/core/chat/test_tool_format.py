from __future__ import annotations

import json

import pytest

from graftlm.core.chat.messages import Message, ToolCall
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import parse_answer
from graftlm.core.chat.tools import Tool
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer

HERMES = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

BARE = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception("one call only") }}{% endif %}
{%- set function = message.tool_calls[0].function %}<|im_start|>assistant
{"name": "{{ function.name }}", "parameters": {{ function.arguments | tojson }}}<|eos|>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PLAIN = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "Adds.")
TWO = (ToolCall("x", "add", {"a": 1}), ToolCall("y", "echo", {"text": 'a "brace" } inside', "deep": {"list": [1, {}]}}))


def tokenizer(template: str) -> Tokenizer:
    hf = byte_tokenizer()
    hf.chat_template = template
    return Tokenizer.from_hf(hf)


def test_the_format_is_read_off_a_template_with_tags() -> None:
    form = ToolFormat.learn(tokenizer(HERMES))
    assert (form.begin, form.middle, form.end) == ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    assert (form.separator, form.marker, form.single_spaces) == ("\n", "<tool_call>", True)
    assert form.lists_tools and form.renders_calls and form.renders_results


def test_the_format_is_read_off_a_template_of_bare_json() -> None:
    form = ToolFormat.learn(tokenizer(BARE))
    assert (form.begin, form.middle, form.end) == ('{"name": "', '", "parameters": ', "}")
    assert form.marker == ""
    assert form.renders_calls and not form.lists_tools


def test_a_template_without_tools_gets_the_generic_format() -> None:
    form = ToolFormat.learn(tokenizer(PLAIN))
    assert form.marker == "<tool_call>"
    assert not form.lists_tools and not form.renders_calls


@pytest.mark.parametrize("template", [HERMES, BARE, PLAIN])
def test_what_is_written_is_what_the_template_renders_in_the_next_turn(template: str) -> None:
    text = tokenizer(template)
    form = ToolFormat.learn(text)
    user = Message("user", "add!")
    prompt, tools = form.prepare([user], [ADD])
    start = text.render(prompt, tools)
    asked, tools = form.prepare([user, Message("assistant", "", tool_calls=TWO[:1])], [ADD])
    assert text.render(asked, tools).startswith(start + form.write(TWO[:1]))


def test_a_template_without_tools_is_told_of_them_in_the_system_message() -> None:
    form = ToolFormat.learn(tokenizer(PLAIN))
    messages = [Message("system", "Be brief."), Message("user", "x"), Message("tool", "3", tool_call_id="a")]
    (system, user, result), tools = form.prepare(messages, [ADD])
    assert tools is None
    assert system.text.startswith("Be brief.") and json.dumps(ADD.to_openai()) in system.text
    assert user.text == "x"
    assert result.role == "tool"  # this template renders any role


@pytest.mark.parametrize("template", [HERMES, PLAIN])
def test_calls_written_are_read_back(template: str) -> None:
    form = ToolFormat.learn(tokenizer(template))
    read = parse_answer(form, "Let me see.\n" + form.write(TWO))
    assert read.content == "Let me see."
    assert [(c.name, c.arguments) for c in read.calls] == [(c.name, c.arguments) for c in TWO]
    assert len({c.id for c in read.calls}) == 2


def test_bare_json_is_a_call_only_where_the_answer_starts() -> None:
    form = ToolFormat.learn(tokenizer(BARE))
    call = form.write(TWO[:1])
    assert [c.name for c in parse_answer(form, call).calls] == ["add"]
    assert parse_answer(form, f"Here: {call}").content == f"Here: {call}"
