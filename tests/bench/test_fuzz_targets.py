"""The fuzz targets on their seeds and on mutations of them; `python -m bench fuzz` runs them by coverage."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from bench.fuzz import main
from bench.fuzz.targets import TARGETS

SLOW = ("schema", "regex", "lark")  # a compilation each


def test_every_target_has_a_name_on_the_command_line() -> None:
    assert tuple(TARGETS) == main.NAMES


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_mutations(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    for seed in target.seeds:
        target.check(seed)
        for _ in range(2 if name in SLOW else 60):
            data = bytearray(seed)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
                data = data or bytearray(b"0")
            target.check(bytes(data))


ODD: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "", "a", [], {}, ["a"], [None], {"a": 1}, [{}], {"type": "text"})
"""Values of all kinds, for a place that expects one of them."""


def test_a_body_with_values_of_other_kinds_is_read_or_refused() -> None:
    rng, seeds = random.Random(0), [json.loads(seed) for seed in TARGETS["body"].seeds]
    for _ in range(1500):
        body = json.loads(json.dumps(rng.choice(seeds)))
        for _ in range(rng.randint(1, 3)):
            holder, key = rng.choice(list(_places(body)))
            holder[key] = json.loads(json.dumps(rng.choice(ODD)))
        TARGETS["body"].check(json.dumps(body).encode())


def _places(value: Any) -> Any:
    """Yield each dict or list inside a JSON value with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
