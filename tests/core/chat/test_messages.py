from __future__ import annotations

import pytest

from graftlm.core.chat.messages import (
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    VideoPart,
    to_messages,
    to_template_dicts,
)
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
    image = {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    messages = to_messages([{"role": "user", "content": [{"type": "text", "text": "see"}, image]}])
    assert messages[0].content == (TextPart("see"), ImagePart("data:x", detail="low"))
    with pytest.raises(
        ConfigError, match=r"message 0 \(user\) holds an image \(data URL of 6 characters\), but m1 reads"
    ):
        to_template_dicts(messages, model_name="m1")
    assert to_template_dicts(messages, multimodal=True)[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image"},
    ]


DATA = "iVBORw0KGgoAAAANSUhEUg=="  # the first bytes of a PNG
URL = f"data:image/png;base64,{DATA}"


@pytest.mark.parametrize(
    ("part", "native"),
    [
        ({"type": "image_url", "image_url": URL}, ImagePart(URL)),
        ({"type": "input_image", "image_url": URL, "detail": "high"}, ImagePart(URL, detail="high")),
        ({"type": "image", "image": b"x"}, ImagePart(b"x")),
        ({"type": "image", "path": "/a.png"}, ImagePart("/a.png")),
        ({"type": "image", "url": "https://h/a"}, ImagePart("https://h/a")),
        ({"type": "image", "base64": DATA, "mime_type": "image/png"}, ImagePart(URL, "image/png")),
        ({"type": "image", "base64": DATA, "id": "lc_1"}, ImagePart(URL)),
        ({"type": "image", "base64": URL}, ImagePart(URL)),
        (
            {"type": "image", "source_type": "base64", "data": DATA, "mime_type": "image/png"},
            ImagePart(URL, "image/png"),
        ),
        ({"type": "image", "source_type": "url", "url": "https://h/a"}, ImagePart("https://h/a")),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
            ImagePart(URL, "image/png"),
        ),
        ({"type": "image", "source": {"type": "url", "url": "https://h/a"}}, ImagePart("https://h/a")),
        ({"type": "video_url", "video_url": {"url": "https://h/v"}}, VideoPart("https://h/v")),
        ({"type": "video", "video": b"v", "num_frames": 4}, VideoPart(b"v", 4)),
        ({"type": "video", "base64": "AAAA"}, VideoPart("data:video/mp4;base64,AAAA")),
    ],
)
def test_media_in_the_form_of_every_client(part: dict[str, object], native: object) -> None:
    ((read,),) = (message.content for message in to_messages([{"role": "user", "content": [part]}]))
    assert read == native


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty"),
        (["hi"], "message 0 is a str"),
        ([{"content": "x"}], "message 0 has role None"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "contnet": "x"}], "message 0 has no content; give text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "give {'type': 'text', 'text': ...}"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "'sound'; parts are text, image_url"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "'input_audio'; models here read",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 has a part of type 'image' without its image"),
        ([{"role": "user", "content": [{"type": "image", "file_id": "f-1"}]}], "the file id 'f-1'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": [1]}]}], "has the image_url list"),
        ([{"role": "user", "content": [{"type": "image", "base64": 5}]}], "data of type int; give base64"),
        ([{"role": "user", "content": [{"type": "image", "url": "u", "detail": "x"}]}], "detail 'x'; use auto"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "without a name"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "broken JSON"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "no JSON object"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(messages: list[object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        to_messages(messages)
