"""DSPy: a signature with typed fields, judged by Evaluate on 16 threads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dspy

INPUTS = json.loads((Path(__file__).parents[1] / "inputs.json").read_text())["dspy"]


max_tokens = 64


class Answer(dspy.Signature):
    """Answer from the passage."""

    passage: str = dspy.InputField()
    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def run(llm: dspy.LM, inputs: Sequence[dict[str, str]]) -> list[str]:
    devset = [dspy.Example(**item).with_inputs("passage", "question") for item in inputs]
    evaluate = dspy.Evaluate(devset=devset, metric=lambda example, made: made.answer == example.answer, num_threads=16)
    with dspy.context(lm=llm):
        result = evaluate(dspy.Predict(Answer))
    return [getattr(made, "answer", "") for _, made, _ in result.results]


def inputs() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = INPUTS[:6]
    return items


def warm_up() -> list[dict[str, Any]]:
    return [{"passage": "The job of Ada Holt is baker.", "question": "What is the job of Ada Holt?", "answer": "baker"}]


def right(item: dict[str, str], answer: str) -> bool:
    return answer.strip() == item["answer"]
