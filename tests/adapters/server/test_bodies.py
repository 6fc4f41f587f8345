"""The values of a body are counted as a parser finds them, wherever its pieces are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import BaseModel

from graftlm.adapters.server import bodies
from graftlm.adapters.server.bodies import JsonCounts, LongTexts
from graftlm.adapters.server.settings import Limits


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 5 else 3)
    if kind == 0:
        return "".join(rng.choice('ab":,{}[]\\\n') for _ in range(rng.randrange(9)))
    if kind < 3:
        return rng.randrange(1000)
    if kind == 3:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {f'k{i}\\":': value(rng, depth + 1) for i in range(rng.randrange(5))}


def members(given: Any) -> int:
    if isinstance(given, dict):
        return len(given) + sum(map(members, given.values()))
    return sum(map(members, given)) if isinstance(given, list) else 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_members_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(bodies, "_PIECE", size)
    rng = random.Random(size)
    for _ in range(100):
        given = value(rng)
        raw, counts = json.dumps(given).encode(), JsonCounts(Limits())
        for end in sorted(rng.randrange(len(raw) + 1) for _ in range(3)):
            assert counts.check(raw[:end]) is None
        assert counts.check(raw) is None
        assert counts.num_members == members(given)
        if counts.num_values > 1 < counts.num_members:  # the quick bound never passes a text with too many
            assert JsonCounts(Limits(json_members=counts.num_members - 1)).may_exceed(raw)
            assert JsonCounts(Limits(json_values=counts.num_values - 1)).may_exceed(raw)


def test_elements_are_counted_and_counting_ends_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps([[1] * 500, {"a": [], "b": "x,y"}]).encode()
    counts = JsonCounts(Limits())
    assert counts.check(raw) is None
    assert (counts.num_members, counts.num_values) == (2, 505)
    monkeypatch.setattr(bodies, "_PIECE", 64)
    counts = JsonCounts(Limits(json_values=20))
    assert "more than 20 values" in str(counts.check(raw))
    assert 20 < counts.num_values < 100


LIMITS = Limits(salt_chars=10, stop_chars=20, constraint_chars=30)


class Texts(BaseModel):
    cache_salt: str = ""
    stop: str = ""
    regex: str = ""


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"cache_salt": "s" * 10}, None),
        ({"cache_salt": "s" * 11}, "cache_salt has more than 10"),
        ({"a": [{"b": '"}'}], "regex": "r" * 31}, "regex has more than 30"),
        ({"cache_salt": "é" * 10, "stop": "\n" * 20}, None),
        ({"cache_salt": "é" * 300}, "cache_salt has more than 10"),
        ({"a": {"regex": "r" * 99}, "b": [{"stop": "s" * 99}]}, None),
        ({"a": '\\"regex": "' + "r" * 99}, None),
        ({"a": 'x", "regex": "' + "r" * 99}, None),
        ({"guided_regex": "r" * 99}, None),
        ({"regex": {"regex": "r" * 99}, "stop": ["s" * 9]}, None),
    ],
)
def test_a_long_text_is_found_before_the_body_has_arrived(given: Any, refused: str | None, size: int) -> None:
    raw, texts, error = json.dumps(given, ensure_ascii="é" not in str(given)).encode(), LongTexts(LIMITS, Texts), None
    for end in range(0, len(raw) + size, size):
        error = error or texts.check(bytearray(raw[:end]))
    assert (error is None) == (refused is None)
    assert error is None or str(error.error["message"]).startswith(refused or "")
