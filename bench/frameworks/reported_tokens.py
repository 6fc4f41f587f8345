"""Prompt tokens that `graftlm ab` reports, beside a count of the same messages by transformers' tokenizer alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.frameworks import _chats
from bench.harness import Options, Row
from graftlm.ab import compare
from graftlm.ab.measure.profile import num_unique
from graftlm.core.model.embedded import sprout_folder
from graftlm.progress import Progress

ENGINES = ("hf", "hf-batching", "graftlm")
ROLES = {"system": "system", "human": "user", "ai": "assistant"}


def run(options: Options) -> Iterator[Row]:
    folder = options.model or str(sprout_folder())
    compared = compare(Path(_chats.__file__), ENGINES, folder, rounds=1, minutes=0.05, progress=Progress())
    prompts = counted(folder, compared.inputs)
    total = sum(map(len, prompts))
    for result in compared.results:
        if not result.rounds:
            print(f"without {result.engine}: {result.error}", file=sys.stderr)
            continue
        for what, found, expected in (
            ("calls", result.work.calls, len(prompts)),
            ("prompt tokens", result.work.prompt_tokens, total),
            ("tokens computed", result.work.computed_tokens, _computed(result.engine, prompts, total)),
        ):
            if found is not None and expected is not None:
                what = f"{what} of {result.engine}, beside {expected:,} counted: difference"
                yield Row("reported_tokens", what, abs(found - expected), "", floor=0, at_most=True)


def _computed(engine: str, prompts: list[list[int]], total: int) -> int | None:
    """Return the tokens that must be computed: all by transformers, each node of the prompts' tree once by GraftLM."""
    return {"hf": total, "graftlm": num_unique(prompts)}.get(engine)


def counted(folder: str, names: list[str]) -> list[list[int]]:
    """Return the token ids of every prompt, by transformers' tokenizer and its chat template."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": ROLES[m.type], "content": m.content} for m in _chats.messages(name)] for name in names]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        for chat in chats
    ]
