"""The fuzz targets on their seeds and on mutations of them; `python -m bench fuzz` runs them by coverage."""

from __future__ import annotations

import random

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
