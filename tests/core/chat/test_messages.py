from __future__ import annotations

import pytest

from graftlm.core.chat.messages import ImagePart, Message, TextPart, ToolCall, to_messages, to_template_dicts
from graftlm.core.errors import ConfigError

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_dicts_of_the_openai_api_become_messages() -> None:
    messages = to_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        ]
    )
    assert messages[0] == Message("assistant", "", (ToolCall("c1", "add", {"a": 1}),))
    assert messages[1].tool_call_id == "c1"
    assert messages[2].content == (TextPart("a"), TextPart("b"))
    assert messages[2].text == "ab"


def test_messages_pass_through_unchanged() -> None:
    message = Message("user", "hi", name="ann")
    assert to_messages([message]) == [message]
    assert to_template_dicts([message]) == [{"role": "user", "content": "hi", "name": "ann"}]


def test_templates_see_text_parts_joined_and_arguments_decoded() -> None:
    dicts = to_template_dicts(to_messages([{"role": "assistant", "content": ["a", "b"], "tool_calls": [CALL]}]))
    assert dicts[0]["content"] == "ab"
    assert dicts[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_an_image_is_refused_by_a_text_model_and_kept_for_a_vision_model() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    messages = to_messages([{"role": "user", "content": [{"type": "text", "text": "see"}, image]}])
    assert messages[0].content == (TextPart("see"), ImagePart("data:x"))
    with pytest.raises(ConfigError, match="an image, but the model reads text only"):
        to_template_dicts(messages)
    assert to_template_dicts(messages, multimodal=True)[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "data:x"},
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        (["hi"], "message 0 is a str"),
        ([{"content": "x"}], "message 0 has role None"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "contnet": "x"}], "message 0 has no content; give text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "give {'type': 'text', 'text': ...}"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "'audio'"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "without a name"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "broken JSON"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "no JSON object"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(messages: list[object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        to_messages(messages)
