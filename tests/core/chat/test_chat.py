from __future__ import annotations

import pytest

from graftlm.core.chat.chat import Chat, ChatFormat, chat_format
from graftlm.core.errors import ConfigError
from graftlm.core.text.tokenizer import Tokenizer
from tests.chat_templates import ALTERNATE, LLAMA_2, MISTRAL, REWRITES, TRIMS
from tests.models import byte_tokenizer
from tests.toy_tokenizers import sentencepiece_tokenizer


def tokenizer_with(template: str | None) -> Tokenizer:
    hf = byte_tokenizer()
    if template is not None:
        hf.chat_template = template
    return Tokenizer.from_hf(hf)


def write(tokenizer: Tokenizer, *turns: tuple[str, str]) -> str:
    chat, text = Chat(ChatFormat(tokenizer)), ""
    for role, content in turns:
        text += chat.begin(role)
        text += "" if chat.held else chat.gap() + content
        chat.write(content)
        text += chat.end()
    return text


TALK = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]


@pytest.mark.parametrize("template", [None, LLAMA_2, TRIMS], ids=["chatml", "llama2", "trims"])
@pytest.mark.parametrize("num_turns", [2, 3, 4, 5])
def test_a_chat_written_turn_by_turn_is_what_the_template_writes_at_once(template: str | None, num_turns: int) -> None:
    tokenizer = tokenizer_with(template)
    messages = [{"role": role, "content": content} for role, content in TALK[:num_turns]]
    assert write(tokenizer, *TALK[:num_turns]) == tokenizer.render(messages, add_generation_prompt=False)


def test_the_text_only_grows() -> None:
    tokenizer = tokenizer_with(LLAMA_2)
    texts = [write(tokenizer, *TALK[:n]) for n in range(6)]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert texts[1] == ""  # the system message waits for the turn it is written in


def test_an_answer_begins_where_the_generation_prompt_ends() -> None:
    tokenizer = tokenizer_with(None)
    chat = Chat(chat_format(tokenizer))
    text = chat.begin("user")
    chat.write("hi")
    text += "hi" + chat.end() + chat.begin("assistant")
    assert text == tokenizer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)


def test_a_system_message_that_moves_about_stays_where_it_was_written() -> None:
    text = write(tokenizer_with(MISTRAL), *TALK[:4])
    assert text == "[INST] S: a[/INST] b</s>[INST] c[/INST]"


def test_a_template_that_rewrites_earlier_turns_cannot_be_continued() -> None:
    with pytest.raises(ConfigError, match="rewrites the end of the user turn"):
        write(tokenizer_with(REWRITES), ("user", "a"), ("user", "b"))


def test_what_the_template_refuses_is_told_with_the_roles() -> None:
    with pytest.raises(ConfigError, match="roles: user, user.*must alternate"):
        write(tokenizer_with(ALTERNATE + LLAMA_2), ("user", "a"), ("user", "b"))


def test_a_model_without_a_chat_template_has_no_turns() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Chat(ChatFormat(Tokenizer.from_hf(sentencepiece_tokenizer()))).begin("system")


def test_turns_do_not_nest() -> None:
    chat = Chat(chat_format(tokenizer_with(None)))
    chat.begin("user")
    with pytest.raises(ConfigError, match="assistant begins inside the turn of user"):
        chat.begin("assistant")


def test_trimming_templates_are_recognised() -> None:
    assert ChatFormat(tokenizer_with(TRIMS)).trims
    assert not ChatFormat(tokenizer_with(None)).trims


def test_a_copy_goes_its_own_way() -> None:
    chat = Chat(chat_format(tokenizer_with(None)))
    chat.begin("user")
    other = chat.copy()
    other.write("x")
    other.end()
    assert chat.open and chat.messages == [{"role": "user", "content": ""}]
    assert other.messages == [{"role": "user", "content": "x"}]
