"""Constrained text on a GPU: valid, and in float32 the text that a CPU writes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.device import SCHEMA, family, on_gpu, satisfies_schema

pytestmark = pytest.mark.gpu

PROMPTS = family(12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_satisfies_its_schema_whatever_else_runs(temperature: float) -> None:
    from graftlm.core.config import SamplingParams
    from graftlm.core.request import Request

    plain = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True, seed=1)
    with on_gpu() as runtime:
        others = runtime.submit_many([Request(prompt, plain) for prompt in family(4, shared=11)])
        done = runtime.generate(PROMPTS, json_schema=SCHEMA, max_tokens=150, temperature=temperature, seed=4)
        assert [len(other.result().token_ids) for other in others] == [60] * 4
    assert [c.text for c in done if not satisfies_schema(c.text)] == []


def test_a_text_that_must_end_early_is_valid_still() -> None:
    with on_gpu() as runtime:
        done = runtime.generate(PROMPTS, json_schema=SCHEMA, max_tokens=66, temperature=1.0, seed=9)
    assert [c.text for c in done if not satisfies_schema(c.text)] == []
    assert max(len(c.token_ids) for c in done) <= 66


@pytest.mark.parametrize(
    "constraint",
    [{"json_schema": SCHEMA}, {"regex": r"(ab|cd){3,9}!\d{2}"}, {"choices": ["yes", "no", "perhaps"]}],
    ids=["schema", "regex", "choices"],
)
def test_the_text_is_the_one_that_a_cpu_writes(constraint: dict[str, Any]) -> None:
    options = {"temperature": 0, "max_tokens": 150, **constraint}
    with on_gpu() as runtime:
        on_device = runtime.generate(PROMPTS, **options)
    with on_gpu(device="cpu") as runtime:
        on_host = runtime.generate(PROMPTS, **options)
    assert [c.token_ids for c in on_device] == [c.token_ids for c in on_host]


def test_one_by_one_and_jumping_over_forced_text_write_the_same() -> None:
    options = {"temperature": 0, "max_tokens": 150, "json_schema": SCHEMA}
    with on_gpu() as runtime:
        jumping = runtime.generate(PROMPTS, **options)
    with on_gpu(jump_forward=False) as runtime:
        stepping = runtime.generate(PROMPTS, **options)
    assert [c.text for c in jumping] == [c.text for c in stepping]
