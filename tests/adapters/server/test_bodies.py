"""The values of a body are counted as a parser finds them, wherever its pieces are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from graftlm.adapters.server import bodies
from graftlm.adapters.server.bodies import count_json


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
        assert count_json(json.dumps(given).encode(), 10**9, 10**9)[0] == members(given)


def test_elements_are_counted_and_counting_ends_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps([[1] * 500, {"a": [], "b": "x,y"}]).encode()
    assert count_json(raw, 10**9, 10**9) == (2, 505)
    monkeypatch.setattr(bodies, "_PIECE", 64)
    assert 20 < count_json(raw, 10**9, 20)[1] < 100
