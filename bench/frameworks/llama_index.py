"""LlamaIndex: the same weights and the same synthesizers behind GraftLLM and HuggingFaceLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from llama_index.core import get_response_synthesizer
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.huggingface import HuggingFaceLLM

from bench.frameworks._instant import Instant, cpu_ms
from bench.frameworks._transformers import same_weights
from bench.harness import Options, Row, paired, rate_row
from graftlm import Runtime
from graftlm.adapters.llama_index import GraftLLM

CASE = "llama_index"
MODES = ("tree_summarize", "accumulate", "compact_accumulate", "refine", "compact", "simple_summarize")


def run(options: Options) -> Sequence[Row]:
    max_tokens = options.choose(16, 48)
    with same_weights(options) as (runtime, model, tokenizer):
        settings = {"context_window": runtime.max_model_len, "is_chat_model": False}
        ours = GraftLLM(
            runtime=runtime,
            temperature=0,
            max_tokens=max_tokens,
            additional_kwargs={"min_tokens": max_tokens},
            **settings,
        )
        theirs = HuggingFaceLLM(
            model=model,
            tokenizer=tokenizer,
            max_new_tokens=max_tokens,
            generate_kwargs={"do_sample": False, "min_new_tokens": max_tokens},
            **settings,
        )
        return [
            *tree_summarize(options, runtime, ours, theirs),
            *four_questions(options, runtime, ours, theirs),
            *synthesizers(options, runtime, ours, theirs),
            overhead(options, runtime),
        ]


def tree_summarize(options: Options, runtime: Runtime, ours: GraftLLM, theirs: HuggingFaceLLM) -> list[Row]:
    """A tree over many chunks; `use_async` lets the chunks of a level go together where the LLM can."""
    count = options.choose(8, 32)
    nodes = _nodes(count, options.choose(60, 200))
    window = options.choose(300, 700)
    answers: dict[str, str] = {}

    def synthesize(name: str, llm: Any) -> None:
        runtime.clear_cache()
        tree = get_response_synthesizer(
            llm=llm, response_mode="tree_summarize", prompt_helper=_packer(llm, window), use_async=True
        )
        answers[name] = str(tree.synthesize("What do the passages say?", nodes))

    return _compare(
        options, f"tree_summarize over {count} chunks", "chunks/s", count, synthesize, ours, theirs, answers
    )


def four_questions(options: Options, runtime: Runtime, ours: GraftLLM, theirs: HuggingFaceLLM) -> list[Row]:
    """Four questions about one context, one after the other and together, as a user would ask them."""
    nodes = _nodes(8, options.choose(100, 180))  # they fit into one prompt
    questions = ["Who is it about?", "Where does it happen?", "When was it?", "Why did they do it?"]
    rows: list[Row] = []
    for together in (False, True):
        answers: dict[str, str] = {}

        def ask(name: str, llm: Any, together: bool = together, answers: dict[str, str] = answers) -> None:
            runtime.clear_cache()
            compact = get_response_synthesizer(
                llm=llm,
                response_mode="compact",
                prompt_helper=_packer(llm, runtime.max_model_len, ours.metadata.num_output),
            )

            async def gathered() -> list[Any]:
                return await asyncio.gather(*(compact.asynthesize(question, nodes) for question in questions))

            found = asyncio.run(gathered()) if together else [compact.synthesize(q, nodes) for q in questions]
            answers[name] = "|".join(map(str, found))

        what = f"4 questions about one context, {'together' if together else 'one after the other'}"
        rows += _compare(options, what, "questions/s", 4, ask, ours, theirs, answers)
    return rows


def synthesizers(options: Options, runtime: Runtime, ours: GraftLLM, theirs: HuggingFaceLLM) -> list[Row]:
    """Each way of answering from eight chunks, async where it can be; how many prompt tokens a run computes."""
    nodes = _nodes(8, options.choose(60, 200))
    rows: list[Row] = []
    for mode in MODES:
        answers: dict[str, str] = {}

        def synthesize(name: str, llm: Any, mode: Any = mode, answers: dict[str, str] = answers) -> None:
            runtime.clear_cache()
            runtime.reset_stats()
            made = get_response_synthesizer(
                llm=llm, response_mode=mode, prompt_helper=_packer(llm, 1200), use_async=True
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


def overhead(options: Options, runtime: Runtime) -> Row:
    """What GraftLLM costs per call above LlamaIndex's own mock, with an engine that answers at once."""
    mock, ours = MockLLM(max_tokens=1), GraftLLM(runtime=Instant(runtime), temperature=0)
    calls = options.choose(200, 2000)
    per_call = {
        name: cpu_ms(lambda llm=llm: llm.complete("hi"), calls) for name, llm in (("mock", mock), ("ours", ours))
    }
    what = "cost of the adapter per call above LlamaIndex's own"
    return Row(CASE, what, per_call["ours"] - per_call["mock"], "ms", floor=0.3, at_most=True)


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


def _packer(llm: Any, window: int, num_output: int = 16) -> PromptHelper:
    """What packs chunks into prompts, counting as Settings.tokenizer would be set for this LLM."""
    count = llm.tokenize if isinstance(llm, GraftLLM) else partial(llm._tokenizer.encode, add_special_tokens=False)
    return PromptHelper(context_window=window, num_output=num_output, tokenizer=count)


def _nodes(count: int, words: int) -> list[NodeWithScore]:
    text = "The river runs past the old mill and the town grew around it over many years. "
    passages = [f"Passage {i}. " + (text * (words // 16 + 1)) for i in range(count)]
    return [NodeWithScore(node=TextNode(text=passage), score=1.0) for passage in passages]
