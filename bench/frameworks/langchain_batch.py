"""`batch` of chats that share a long system prompt: ChatGraftLM beside LangChain's classes for transformers.

The baselines are HuggingFacePipeline at its best batch size, ChatHuggingFace, and transformers' continuous batching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel

from bench.frameworks._transformers import (
    chat_pipeline,
    continuous_batching,
    fastest_text_pipeline,
    rendered,
    same_weights,
)
from bench.harness import Options, Row, paired, rate_row
from graftlm import Runtime
from graftlm.adapters.langchain import ChatGraftLM

CASE = "langchain_batch"


def run(options: Options) -> Sequence[Row]:
    with same_weights(options) as (runtime, model, tokenizer):
        return shared_system_prompt(options, runtime, model, tokenizer)


def shared_system_prompt(options: Options, runtime: Runtime, theirs: PreTrainedModel, tokenizer: Any) -> list[Row]:
    num_chats, num_system, max_tokens = options.choose((16, 300, 8), (64, 1000, 32))
    system = tokenizer.decode(tokenizer.encode("The archive holds facts about people and places. " * 400)[:num_system])
    chats = [[("system", system), ("human", f"Question {i}: what does fact {i * 7} say?")] for i in range(num_chats)]
    prompts = [rendered(tokenizer, chat) for chat in chats]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    llm = ChatGraftLM(runtime=runtime, temperature=0, max_tokens=max_tokens, min_tokens=max_tokens)
    text, batch_size = fastest_text_pipeline(theirs, tokenizer, max_tokens, prompts)
    chat_model = chat_pipeline(theirs, tokenizer, max_tokens)

    answers: dict[str, list[str]] = {}

    def graftlm() -> None:
        runtime.clear_cache()
        runtime.reset_stats()
        answers["graftlm"] = [str(message.content) for message in llm.batch(chats)]

    def continuous() -> list[str]:
        return [tokenizer.decode(answer) for answer in continuous_batching(theirs, ids, max_tokens)]

    jobs: dict[str, tuple[float, Callable[[], list[str]]]] = {
        f"HuggingFacePipeline(batch_size={batch_size})": (8, lambda: text.batch(prompts)),
        "ChatHuggingFace": (8, lambda: [str(message.content) for message in chat_model.batch(chats)]),
        "continuous batching": (3, continuous),
    }
    what = f"batch of {num_chats} chats sharing {num_system:,} tokens"
    shape = {"chats": num_chats, "system_tokens": num_system, "max_tokens": max_tokens}
    llm.batch(chats[:2])
    rows: list[Row] = []
    for name, (floor, job) in jobs.items():

        def baseline(name: str = name, job: Callable[[], list[str]] = job) -> None:
            answers[name] = job()

        times = paired({"graftlm": graftlm, name: baseline}, 1, warm=False)
        rows.append(
            rate_row(
                CASE,
                f"{what}, against {name}",
                "chats/s",
                num_chats,
                times["graftlm"],
                times[name],
                floor=floor,
                shape=shape,
            )
        )
    for name in list(jobs)[:2]:  # continuous batching cannot forbid the end token, which the others do
        equal = sum(a.strip() == b.strip() for a, b in zip(answers["graftlm"], answers[name], strict=True))
        rows.append(Row(CASE, f"answers equal to those of {name}", equal, "chats", floor=num_chats, shape=shape))
    stats, given = runtime.stats(), sum(map(len, ids))
    return [
        *rows,
        Row(CASE, "prompt tokens computed, of those given", stats.computed_tokens, "tokens", baseline=given),
        Row(CASE, "largest batch", stats.largest_batch, "sequences", floor=num_chats),
    ]
