"""DSPy: a signature with typed fields, judged by Evaluate on 16 threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dspy
from dspy import lm15

INPUTS = json.loads((Path(__file__).parents[1] / "inputs.json").read_text())["dspy"]


class TransformersEngine:
    """A local model behind DSPy the way a user writes it: the chat template, then `generate`, one call at a time."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.lock = threading.Lock()

    def complete(self, request: lm15.Request) -> lm15.Response:
        messages = [{"role": m.role, "content": m.text} for m in request.messages]
        if request.system:
            messages.insert(0, {"role": "system", "content": str(request.system)})
        given = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with self.lock:
            output = self.model.generate(**given, max_new_tokens=request.config.max_tokens, do_sample=False)
        new = output[0, given["input_ids"].shape[1] :]
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        usage = lm15.Usage(input_tokens=given["input_ids"].shape[1], output_tokens=len(new))
        return lm15.Response(None, request.model, lm15.Message.assistant(text), "stop", usage)


def hf(model: str) -> dspy.LM:
    return dspy.LM("local/transformers", engine=TransformersEngine(model), cache=False, max_tokens=64, temperature=0)


def graftlm(model: str) -> dspy.LM:
    from graftlm.adapters.dspy import GraftLM

    return GraftLM(model, cache=False, max_tokens=64, temperature=0)


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
    items: list[dict[str, Any]] = INPUTS
    return items


def warm_up() -> list[dict[str, Any]]:
    return [{"passage": "The job of Ada Holt is baker.", "question": "What is the job of Ada Holt?", "answer": "baker"}]


def right(item: dict[str, str], answer: str) -> bool:
    return answer.strip() == item["answer"]
