from __future__ import annotations

import json

import pytest

from graftlm.core.chat.messages import ToolCall
from graftlm.core.chat.tool_format import ToolFormat
from graftlm.core.chat.tool_parser import ToolParser, parse_answer

TWO = (ToolCall("x", "add", {"a": 1}), ToolCall("y", "echo", {"text": 'a "brace" } inside', "deep": {"list": [1, {}]}}))


def test_text_cut_into_single_characters_gives_the_same_calls() -> None:
    form = ToolFormat()
    text = "Well <tool, then:\n" + form.write(TWO)
    stream = ToolParser(form)
    deltas = [delta for character in text for delta in stream.push(character)] + stream.finish()
    assert "".join(d.text for d in deltas if d.index is None) == "Well <tool, then:"
    assert [d.name for d in deltas if d.name] == ["add", "echo"]
    arguments = ["".join(d.text for d in deltas if d.index == i) for i in range(2)]
    assert list(map(json.loads, arguments)) == [c.arguments for c in TWO]
    assert [c.arguments for c in stream.calls] == [c.arguments for c in TWO]


def test_a_call_that_is_cut_off_is_invalid_and_not_lost() -> None:
    read = parse_answer(ToolFormat(), '<tool_call>\n{"name": "add", "arguments": {"a": 1')
    assert read.calls == ()
    (cut,) = read.invalid
    assert (cut.name, cut.arguments) == ("add", '{"a": 1')
    assert "raise max_tokens" in cut.error


def test_text_without_a_call_is_left_as_it_is() -> None:
    assert parse_answer(ToolFormat(), "a < b <tool_cal\n").content == "a < b <tool_cal\n"


@pytest.mark.parametrize("text", ['<tool_call>\n{"name": "', '<tool_call>\n{"name": "ad'])
def test_a_text_that_ends_inside_the_name_of_a_tool_used_to_be_a_call_of_no_name(text: str) -> None:
    read = parse_answer(ToolFormat(), text)
    assert (read.content, read.calls, read.invalid) == (text, (), ())
    stream = ToolParser(ToolFormat())
    deltas = [delta for character in text for delta in stream.push(character)] + stream.finish()
    assert "".join(delta.text for delta in deltas if delta.index is None) == text
