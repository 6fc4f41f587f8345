"""Texts that are drawn at random are the same in every run of a test: `same_draws` in conftest.py."""

from __future__ import annotations

import os
import random

import pytest

from graftlm import Runtime
from tests.models import byte_tokenizer, tiny_model


def test_requests_without_a_seed_take_those_of_their_test(request: pytest.FixtureRequest) -> None:
    seeds = random.Random(os.environ.get("GRAFTLM_TEST_DRAWS", "") + request.node.nodeid)
    with (
        Runtime(tiny_model(), tokenizer=byte_tokenizer()) as one,
        Runtime(tiny_model(), tokenizer=byte_tokenizer()) as two,
    ):
        drawn = [rt.generate("x", max_tokens=20, ignore_eos=True).token_ids for rt in (one, one, two)]
        again = [one.generate("x", max_tokens=20, ignore_eos=True, seed=seeds.getrandbits(63)).token_ids for _ in drawn]
    assert drawn == again and len(set(map(tuple, drawn))) == 3
