from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graftlm as gl
from graftlm.testing.random_vision import random_picture, random_vision_model, save_vision_model
from tests.vision import question, reference, written

CAT, DOG = random_picture(0), random_picture(1, 60, 90)
QUESTIONS = [
    question("What is it?", CAT),
    question("And its colour?", CAT),
    question("What is it?", DOG),
    question("Compare them", CAT, DOG),
    question("Compare them", DOG, CAT),
    question("No picture"),
]


def answers(runtime: gl.Runtime, prompts: list[Any]) -> list[tuple[list[int], int]]:
    done = runtime.generate(prompts, max_tokens=8, temperature=0)
    return [(written(one.token_ids), one.usage.prompt_tokens) for one in done]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava_onevision", "gemma3", "gemma4"])
def test_answers_are_those_of_transformers(family: str) -> None:
    model, processor = random_vision_model(family)
    expected = [reference(model, processor, one) for one in QUESTIONS]
    with gl.Runtime(model, tokenizer=processor, device="cpu") as runtime:
        assert answers(runtime, QUESTIONS) == expected
        assert runtime.stats().execution.startswith("paged")
        assert [answers(runtime, [one])[0] for one in QUESTIONS] == expected  # warm
    with gl.Runtime(model, tokenizer=processor, device="cpu", max_step_tokens=7) as runtime:
        assert [answers(runtime, [one])[0] for one in QUESTIONS] == expected


def test_a_folder_loads_by_its_name(tmp_path: Path) -> None:
    folder = save_vision_model("qwen2_5_vl", tmp_path / "model")
    model, processor = random_vision_model("qwen2_5_vl")
    CAT.save(tmp_path / "cat.png")
    with gl.Runtime(folder, device="cpu") as runtime:
        expected = reference(model, processor, question("What is it?", CAT))
        assert answers(runtime, [question("What is it?", str(tmp_path / "cat.png"))]) == [expected]
