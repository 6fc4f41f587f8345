"""Large batches reach the engine in waves, so that it begins before the last prompt is tokenised."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.request import Request
from graftlm.core.serving import prompt_waves
from graftlm.core.serving.prompt_waves import WAVE_CHARS, waves
from graftlm.testing import ScriptedModel


def sizes(*prompts: Any) -> list[int]:
    """How many requests are in each wave."""
    return [len(prompts[part]) for part in waves([Request(prompt) for prompt in prompts])]


def distinct(count: int, num_chars: int) -> list[str]:
    return [f"{i:09}".ljust(num_chars, "x") for i in range(count)]


def test_a_batch_of_little_text_is_one_wave() -> None:
    assert sizes(*distinct(64, WAVE_CHARS // 64)) == [64]
    assert sizes([1, 2], [{"role": "user", "content": "a"}]) == [2]


def test_a_batch_is_cut_where_the_text_of_a_wave_is_full() -> None:
    assert sizes(*distinct(10, WAVE_CHARS // 4)) == [4, 4, 2]
    chats = [[{"role": "user", "content": text}] for text in distinct(10, WAVE_CHARS // 4)]
    assert sizes(*chats) == [4, 4, 2]


def test_text_that_prompts_begin_with_counts_once() -> None:
    document = "y" * (WAVE_CHARS // 2)
    assert sizes(*(f"{document}{i}" for i in range(64))) == [64]


@pytest.mark.parametrize("picture", [bytes, lambda i: {"url": f"data:{i}"}, lambda i: [i]])
def test_a_wave_has_eight_new_pictures(picture: Any) -> None:
    pictures = [picture(i) for i in range(1, 11)] * 2
    chats = [[{"role": "user", "content": [{"type": "image_url", "image_url": one}]}] for one in pictures]
    assert sizes(*chats) == [8, 12]


def test_a_known_picture_counts_as_no_text() -> None:
    chats = [[{"role": "user", "content": [{"type": "image", "image": bytes(i)}]}] for i in range(1, 16)]
    requests = [Request(chat) for chat in chats]
    assert list(waves(requests, lambda source: len(source) < 6)) == [slice(0, 13), slice(13, 15)]
    assert list(waves(requests, lambda source: True)) == [slice(0, 15)]


def test_the_engine_has_the_first_wave_before_the_next_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_waves, "WAVE_CHARS", 100)
    with ScriptedModel(lambda prompt: "yes").runtime() as runtime:
        order: list[tuple[str, int]] = []
        prepare, add = runtime._source.prepare, runtime._thread.add

        def prepared(some: Any) -> Any:
            order.append(("prepared", len(some)))
            return prepare(some)

        def added(some: Any) -> None:
            order.append(("added", len(some)))
            add(some)

        monkeypatch.setattr(runtime._source, "prepare", prepared)
        monkeypatch.setattr(runtime._thread, "add", added)
        answers = runtime.generate(distinct(4, 50), max_tokens=3)
    assert order == [("prepared", 2), ("added", 2), ("prepared", 2), ("added", 2)]
    assert [answer.text for answer in answers] == ["yes"] * 4


def test_an_interrupt_between_two_waves_cancels_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_waves, "WAVE_CHARS", 100)
    with ScriptedModel(lambda prompt: "yes" * 400).runtime() as runtime:
        prepare, seen = runtime._source.prepare, []

        def interrupted(some: Any) -> Any:
            if seen:
                raise KeyboardInterrupt
            seen.append(some)
            return prepare(some)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(runtime._source, "prepare", interrupted)
            runtime.generate(distinct(4, 50), max_tokens=1000)
        assert runtime.generate("a", max_tokens=3).text
        assert runtime.stats().running == 0
