"""LlamaIndex: a tree over many passages, and questions about one context, behind GraftLLM and HuggingFaceLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core import get_response_synthesizer
from llama_index.llms.huggingface import HuggingFaceLLM

from bench.frameworks._llama_index import CASE, both, packer, passages
from bench.harness import Options, Row, paired, rate_row
from graftlm import Runtime
from graftlm.adapters.llama_index import GraftLLM


def run(options: Options) -> Sequence[Row]:
    with both(options) as (runtime, ours, theirs):
        return [
            *tree_summarize(options, runtime, ours, theirs),
            *four_questions(options, runtime, ours, theirs),
        ]


def tree_summarize(options: Options, runtime: Runtime, ours: GraftLLM, theirs: HuggingFaceLLM) -> list[Row]:
    """Summarise many chunks in a tree; `use_async` submits the chunks of a level together if the LLM supports it."""
    count = options.choose(8, 32)
    nodes = passages(count, options.choose(60, 200))
    window = options.choose(300, 700)
    answers: dict[str, str] = {}

    def synthesize(name: str, llm: Any) -> None:
        runtime.clear_cache()
        tree = get_response_synthesizer(
            llm=llm, response_mode="tree_summarize", prompt_helper=packer(llm, window), use_async=True
        )
        answers[name] = str(tree.synthesize("What do the passages say?", nodes))

    return _compare(
        options, f"tree_summarize over {count} chunks", "chunks/s", count, synthesize, ours, theirs, answers
    )


def four_questions(options: Options, runtime: Runtime, ours: GraftLLM, theirs: HuggingFaceLLM) -> list[Row]:
    """Four questions about one context, one after the other and together, as a user would ask them."""
    nodes = passages(8, options.choose(100, 180))  # they fit into one prompt
    questions = ["Who is it about?", "Where does it happen?", "When was it?", "Why did they do it?"]
    rows: list[Row] = []
    for together in (False, True):
        answers: dict[str, str] = {}

        def ask(name: str, llm: Any, together: bool = together, answers: dict[str, str] = answers) -> None:
            runtime.clear_cache()
            compact = get_response_synthesizer(
                llm=llm,
                response_mode="compact",
                prompt_helper=packer(llm, runtime.max_model_len, ours.metadata.num_output),
            )

            async def gathered() -> list[Any]:
                return await asyncio.gather(*(compact.asynthesize(question, nodes) for question in questions))

            found = asyncio.run(gathered()) if together else [compact.synthesize(q, nodes) for q in questions]
            answers[name] = "|".join(map(str, found))

        what = f"4 questions about one context, {'together' if together else 'one after the other'}"
        rows += _compare(options, what, "questions/s", 4, ask, ours, theirs, answers)
    return rows


def _compare(
    options: Options, what: str, unit: str, count: int, job: Any, ours: Any, theirs: Any, answers: dict[str, str]
) -> list[Row]:
    times = paired(
        {"ours": lambda: job("ours", ours), "theirs": lambda: job("theirs", theirs)},
        options.choose(1, options.repeats),
    )
    equal = float(answers["ours"].strip() == answers["theirs"].strip())
    return [
        rate_row(CASE, f"{what}, against HuggingFaceLLM", unit, count, times["ours"], times["theirs"], floor=3.0),
        Row(CASE, f"{what}: answers equal", equal, "of 1", floor=1.0),
    ]
