"""The fuzz targets on their seeds, on the corpus and on mutations; `python -m bench fuzz` runs them by coverage."""

from __future__ import annotations

import json
import random

import pytest

from bench.fuzz import main
from bench.fuzz.mutation import ODD, places
from bench.fuzz.targets import TARGETS

SLOW = ("schema", "regex", "lark")  # a compilation each


def test_every_target_has_a_name_on_the_command_line() -> None:
    assert tuple(TARGETS) == main.NAMES


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_its_corpus_and_mutations(name: str) -> None:
    target, rng, kept = TARGETS[name], random.Random(name), main.corpus(name)
    assert kept
    for found in rng.sample(kept, min(len(kept), 5 if name in SLOW else 40)):
        target.check(found)
    for seed in target.seeds:
        target.check(seed)
        for _ in range(2 if name in SLOW else 60):
            data = bytearray(seed)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(data))
                data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
                data = data or bytearray(b"0")
            target.check(bytes(data))


def test_a_body_with_values_of_other_kinds_is_read_or_refused() -> None:
    rng, seeds = random.Random(0), [json.loads(seed) for seed in TARGETS["body"].seeds]
    for _ in range(1500):
        body = json.loads(json.dumps(rng.choice(seeds)))
        for _ in range(rng.randint(1, 3)):
            holder, key = rng.choice(places(body))
            holder[key] = json.loads(json.dumps(rng.choice(ODD)))
        TARGETS["body"].check(json.dumps(body).encode())
