"""Bodies that cost far more than they weigh are refused before they cost it, or run without stopping others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.server.hostile.conftest import CHAT, post, steady
from tests.served import Served

MESSAGE = {"role": "user", "content": "a"}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"stop": "a" * 150_000}, "stop has more than 4,096 characters"),
        ({"stop": "a" * 10_000, "n": 32}, "stop has 10,000 characters"),
        ({"stop": [f"s{i}" for i in range(100_000)]}, "stop has 100,000 strings"),
        ({"logit_bias": {str(2**63 - 1): 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(2**80): 1}}, "logit_bias"),
        ({"cache_salt": "s" * (8 << 20)}, "cache_salt has more than 256 characters"),
        ({"regex": "a" * (8 << 20)}, "regex has more than 262,144 characters"),
        ({"guided_choice": ["a" * (1 << 20)]}, "constraint has 1,048,576 characters"),
        ({"tools": [tool(f"f{i}") for i in range(15_000)]}, "tools has 15,000 entries"),
        ({"messages": [MESSAGE] * 40_000}, "messages has 40,000 entries"),
        ({"messages": [MESSAGE] * 300_000}, "members of objects"),
        ({"metadata": {f"k{i}": "" for i in range(1_500_000)}}, "members of objects"),
        ({"messages": [{"role": "user", "content": "word " * 600_000}]}, "3,000,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_beyond_the_limits_gets_400(guarded: Served, given: dict[str, Any], part: str) -> None:
    with steady(guarded):
        answer = post(guarded, {**CHAT, **given})
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_a_text_of_thirty_megabytes_gets_400(keyed: Served) -> None:  # its bodies have a minute to arrive
    with steady(keyed, authorization="Bearer mine"):
        body = {**CHAT, "messages": [{"role": "user", "content": "a" * 30_000_000}]}
        answer = post(keyed, body, authorization="Bearer mine")
    assert answer.status_code == 400
    assert "30,000," in answer.json()["error"]["message"]


@pytest.mark.parametrize(("prompt", "more"), [(["a"] * 5000, {"n": 8}), (["a"] * 10, {"n": 128}), ([[1]] * 5000, {})])
def test_sequences_count_and_not_only_requests(guarded: Served, prompt: Any, more: dict[str, Any]) -> None:
    with steady(guarded):
        answer = post(guarded, {"prompt": prompt, "max_tokens": 4, **more}, "/v1/completions")
    assert answer.status_code == 400
    assert "the server takes 1,024" in answer.json()["error"]["message"]


def test_a_long_text_is_tokenised_without_stopping_others(guarded: Served) -> None:
    text = "the sea is blue and " * 12_000
    with steady(guarded) as count:
        before = count()
        answer = post(guarded, {"prompt": text}, "/tokenize")
        assert count() > before
    assert answer.status_code == 200
    assert answer.json()["count"] > 40_000


@pytest.mark.parametrize("text", ["the sea is blue " * 700_000, "a" * 10_000_000], ids=["words", "no place to cut"])
def test_a_text_too_long_is_refused(guarded: Served, text: str) -> None:
    with steady(guarded):
        answer = post(guarded, {"prompt": text}, "/tokenize")
    assert answer.status_code == 400


def test_many_ids_are_not_decoded(guarded: Served) -> None:
    with steady(guarded):
        assert post(guarded, {"tokens": [5] * 1_000_000}, "/detokenize").status_code == 400


def test_one_request_fails_alone_in_a_list_of_bad_ones(guarded: Served) -> None:
    bad = [{"logit_bias": {str(2**63 - 1): 1}}, {"stop_token_ids": [2**70]}, {"stop_token_ids": [-5]}]
    with steady(guarded):
        for given in bad * 10:
            assert post(guarded, {**CHAT, **given}).status_code == 400
