"""Mutations that keep an input readable: of JSON by its values, of texts by the words of their language."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

Mutator = Callable[[bytes, int, int], bytes]
"""(input, longest length, seed) -> a new input, as libFuzzer calls it."""

ODD: tuple[Any, ...] = (None, True, -1, 0, 1.5, 10**30, 1e308, "", "a", [], {}, ["a"], [None], {"a": 1}, [{}])
"""Values of all kinds, for a place that expects one of them."""


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each dict or list inside a JSON value with each of its keys."""
    found, waiting = [], [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            for key in list(inner) if isinstance(inner, dict) else range(len(inner)):
                found.append((inner, key))
                waiting.append(inner[key])
    return found


def json_mutator(examples: Sequence[Any], otherwise: Callable[[bytes, int], bytes]) -> Mutator:
    """Return a mutator of JSON texts.

    examples   JSON values whose members and values are put into others.
    otherwise  mutates bytes: a quarter of the inputs, and those that are no JSON.
    """
    members = [(key, holder[key]) for example in examples for holder, key in places(example) if isinstance(key, str)]
    values = [*ODD, *examples, *(value for _, value in members)]

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        try:
            whole = json.loads(data)
        except (ValueError, RecursionError):
            return otherwise(data, most) if rng.random() < 0.5 else json.dumps(rng.choice(examples)).encode()[:most]
        if rng.random() < 0.2:
            return otherwise(data, most)
        for _ in range(rng.choice((1, 1, 2, 4))):
            whole = _changed(whole, rng, members, values)
        try:
            found = json.dumps(whole).encode()
        except (ValueError, RecursionError):
            return data
        return found if len(found) <= most else data

    return mutate


def _changed(whole: Any, rng: random.Random, members: Sequence[tuple[str, Any]], values: Sequence[Any]) -> Any:
    """Change one place of a JSON value: remove, replace, copy, wrap or add."""
    found = places(whole)
    if not found:
        return _copy(rng.choice(values))
    holder, key = rng.choice(found)
    way = rng.randrange(6)
    if way == 0:
        del holder[key]
    elif way == 1:
        holder[key] = _copy(rng.choice(values))
    elif way == 2:
        source, name = rng.choice(found)
        holder[key] = _copy(source[name])
    elif way == 3:
        word, value = rng.choice(members)
        holder[key] = [holder[key]] if rng.random() < 0.5 else {word: holder[key], **_copy({word: value})}
    elif isinstance(holder, dict):
        word, value = rng.choice(members)
        holder[word] = _copy(value)
    else:
        holder.insert(key, _copy(rng.choice(values)))
    return whole


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))
