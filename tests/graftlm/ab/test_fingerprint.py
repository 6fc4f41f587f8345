from __future__ import annotations

from typing import Any

from graftlm.ab.fingerprint import Fingerprint


def of(*prompts: Any) -> int | None:
    fingerprint = Fingerprint()
    for prompt in prompts:
        fingerprint.add(prompt)
    return fingerprint.value


def test_prompts_are_told_apart_whatever_their_order() -> None:
    assert of() is None
    assert of("one", [1, 2]) == of([1, 2], "one") != of("one", [1, 3])
    assert of("one") != of("one", "one")


def test_the_text_of_messages_counts_and_their_ids_do_not() -> None:
    def body(text: str, number: str) -> bytes:
        return f'{{"messages": [{{"content": "{text}", "tool_call_id": "{number}"}}]}}'.encode()

    assert of(body("It is 12:30", "call_1")) == of(body("It is 12:30", "call_2")) != of(body("It is 12:31", "call_1"))
