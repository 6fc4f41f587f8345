"""Shared parts of the LlamaIndex cases: GraftLLM and HuggingFaceLLM on the same weights, passages, their packing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.huggingface import HuggingFaceLLM

from bench.frameworks._transformers import same_weights
from bench.harness import Options
from graftlm import Runtime
from graftlm.adapters.llama_index import GraftLLM

CASE = "llama_index"


@contextmanager
def both(options: Options) -> Iterator[tuple[Runtime, GraftLLM, HuggingFaceLLM]]:
    """Return a loaded runtime, GraftLLM on it and HuggingFaceLLM; both answer with equally many tokens."""
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
        yield runtime, ours, theirs


def packer(llm: Any, window: int, num_output: int = 16) -> PromptHelper:
    """Return the packer of chunks into prompts, with the token counter of this LLM."""
    count = llm.tokenize if isinstance(llm, GraftLLM) else partial(llm._tokenizer.encode, add_special_tokens=False)
    return PromptHelper(context_window=window, num_output=num_output, tokenizer=count)


def passages(count: int, words: int) -> list[NodeWithScore]:
    text = "The river runs past the old mill and the town grew around it over many years. "
    passages = [f"Passage {i}. " + (text * (words // 16 + 1)) for i in range(count)]
    return [NodeWithScore(node=TextNode(text=passage), score=1.0) for passage in passages]
