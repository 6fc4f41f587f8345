"""Drafts from the text itself: sprout's own questions with and without, one at a time and eight together.

"repetition" begins a passage a second time, "questions" ask about it and go on, "sampled" is the same at temperature 1.
Same weights, same process; the answers must be equal. One at a time, transformers' own prompt lookup is run beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from bench.harness import Options, Row, paired, rate_row
from graftlm import Request, Runtime, SamplingParams
from graftlm.core.model.embedded import sprout_folder
from graftlm.demo.pipelines.llama_index import inputs

CASE = "speculation"
NUM_NEW = 48
FLOOR = 0.95
"""Floor: not slower than without drafts, apart from the noise of a busy machine."""
LOOKUP = 3
"""Draft tokens of transformers' prompt lookup."""


def run(options: Options) -> Sequence[Row]:
    count = options.choose(8, 24)
    rows: list[Row] = []
    theirs = AutoModelForCausalLM.from_pretrained(str(sprout_folder()), dtype=torch.float32).eval()
    with _runtime("auto") as drafting, _runtime("off") as single:
        for name, requests in _workloads(count).items():
            for batch in (1, 8):
                rows += _compare(name, requests, batch, drafting, single, options)
            if name != "sampled":
                rows.append(_beside_transformers(name, requests[: options.choose(3, 8)], drafting, theirs, options))
    return rows


def _runtime(speculation: Any) -> Runtime:
    return Runtime("sprout", dtype="float32", speculation=speculation).load()


def _workloads(count: int) -> dict[str, list[Request]]:
    """Prompts of the demo's questions about passages, answered greedily, sampled, and by a sentence said again."""
    items = inputs()
    asked = [f"{item['passage']}\n\nQuestion: {item['question']}\nAnswer:" for item in items]
    again = [f"{item['passage']}\n\n{item['passage'][: len(item['passage']) // 3]}" for item in items]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True}

    def of(prompts: list[str], **sampling: Any) -> list[Request]:
        return [Request(prompts[i % len(prompts)], SamplingParams(**sampling)) for i in range(count)]

    return {
        "questions": of(asked, **greedy),
        "repetition": of(again, **greedy),
        "sampled": of(asked, **greedy | {"temperature": 1.0, "seed": 5}),
    }


def _compare(
    name: str, requests: list[Request], batch: int, drafting: Runtime, single: Runtime, options: Options
) -> list[Row]:
    answers: dict[str, list[list[int]]] = {}

    def answered(key: str, runtime: Runtime) -> None:
        runtime.clear_cache()  # also drops recent answers, which drafts are copied from
        answers[key] = []
        for first in range(0, len(requests), batch):
            futures = runtime.submit_many([_again(request) for request in requests[first : first + batch]])
            answers[key] += [future.result().token_ids for future in futures]

    times = paired(
        {"ours": lambda: answered("ours", drafting), "off": lambda: answered("off", single)}, options.repeats
    )
    drafting.reset_stats()
    answered("ours", drafting)
    stats = drafting.stats()
    what = f"{name}, batch {batch}"
    num_tokens = sum(map(len, answers["off"]))
    equal = sum(a == b for a, b in zip(answers["ours"], answers["off"], strict=True))
    return [
        rate_row(
            CASE, f"{what}: against speculation='off'", "tokens/s", num_tokens, times["ours"], times["off"], floor=FLOOR
        ),
        Row(CASE, f"{what}: drafts that came true", stats.accepted_tokens, "tokens", baseline=stats.drafted_tokens),
        Row(CASE, f"{what}: steps", stats.steps, "steps", baseline=num_tokens / batch),
        Row(CASE, f"{what}: answers equal", equal, "answers", baseline=len(requests), floor=len(requests)),
    ]


def _again(request: Request) -> Request:
    return Request(request.prompt, request.sampling)


def _beside_transformers(
    name: str, requests: list[Request], drafting: Runtime, model: PreTrainedModel, options: Options
) -> Row:
    tokenizer = drafting.tokenizer
    prompts = [torch.tensor([tokenizer.encode(request.prompt)]) for request in requests]
    model.generation_config = GenerationConfig(pad_token_id=0)
    settings: dict[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False}

    def generate(**more: Any) -> None:
        with torch.inference_mode():
            for prompt in prompts:
                model.generate(prompt, **settings, **more)

    def ours() -> None:
        drafting.clear_cache()
        for request in requests:
            drafting.submit(_again(request)).result()

    times = paired({"ours": ours, "theirs": lambda: generate(prompt_lookup_num_tokens=LOOKUP)}, options.repeats)
    what = f"{name}, batch 1: against transformers' prompt lookup"
    return rate_row(CASE, what, "tokens/s", NUM_NEW * len(requests), times["ours"], times["theirs"])
