"""LlamaIndex: every way of answering from a few passages, once on each LLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llama_index.core import get_response_synthesizer
from llama_index.llms.huggingface import HuggingFaceLLM

from bench.frameworks._llama_index import CASE, both, packer, passages
from bench.harness import Options, Row, paired, rate_row
from graftlm import Runtime
from graftlm.adapters.llama_index import GraftLLM

MODES = ("tree_summarize", "accumulate", "compact_accumulate", "refine", "compact", "simple_summarize")


def run(options: Options) -> Sequence[Row]:
    with both(options) as (runtime, ours, theirs):
        return synthesizers(options, runtime, ours, theirs)


def synthesizers(options: Options, runtime: Runtime, ours: GraftLLM, theirs: HuggingFaceLLM) -> list[Row]:
    """Measure each synthesizer on eight chunks, async if supported: time and computed prompt tokens."""
    nodes = passages(8, options.choose(60, 200))
    rows: list[Row] = []
    for mode in MODES:
        answers: dict[str, str] = {}

        def synthesize(name: str, llm: Any, mode: Any = mode, answers: dict[str, str] = answers) -> None:
            runtime.clear_cache()
            runtime.reset_stats()
            made = get_response_synthesizer(
                llm=llm, response_mode=mode, prompt_helper=packer(llm, 1200), use_async=True
            )
            answers[name] = str(made.synthesize("What do the passages say?", nodes))

        times = paired({"theirs": partial(synthesize, "theirs", theirs), "ours": partial(synthesize, "ours", ours)}, 1)
        stats = runtime.stats()
        what = f"{mode} over 8 chunks"
        rows += [
            rate_row(CASE, f"{what}, against HuggingFaceLLM", "runs/s", 1, times["ours"], times["theirs"]),
            Row(
                CASE,
                f"{what}: prompt tokens computed, of those given in {stats.requests} calls",
                stats.computed_tokens,
                "tokens",
                baseline=stats.prompt_tokens,
            ),
            Row(CASE, f"{what}: answers equal", float(answers["ours"].strip() == answers["theirs"].strip()), "of 1"),
        ]
    return rows
