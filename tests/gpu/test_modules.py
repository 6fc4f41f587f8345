"""Modules on a GPU: float32 tokens are those of a mask and positions, in every order, in graphs and in batches."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.core.scheduling.test_module_requests import GREEDY, MODULES, REST, answers_of, composed, reference
from tests.gpu.device import on_gpu
from tests.models import random_prompt

pytestmark = pytest.mark.gpu


def test_modules_are_read_in_every_order() -> None:
    long = random_prompt(60, 8)
    with on_gpu(max_step_tokens=32) as runtime:
        for order in itertools.permutations(MODULES):
            assert runtime.generate(composed([*order]), **GREEDY).token_ids == reference([*order], REST)
        prompts = [composed([*order], rest) for order in itertools.permutations(MODULES) for rest in (REST, long)]
        answers = [answer.token_ids for answer in answers_of(runtime, prompts)]
        assert answers[0::2] == [reference(MODULES, REST)] * 6 and answers[1::2] == [reference(MODULES, long)] * 6


def test_modules_in_bfloat16_are_computed_once() -> None:
    with on_gpu(dtype=torch.bfloat16) as runtime:
        prompts = [composed([*order]) for order in itertools.permutations(MODULES)]
        answers = answers_of(runtime, prompts)
        assert {answer.usage.cached_tokens for answer in answers} == {sum(map(len, MODULES))}
        assert runtime.stats().computed_tokens == sum(map(len, MODULES)) + 6 * len(REST)
