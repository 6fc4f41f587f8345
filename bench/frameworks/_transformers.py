"""Plain transformers behind LangChain and LlamaIndex, on a model and tokenizer that are already loaded."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bench.harness import Options, timed
from graftlm import Runtime
from graftlm.core.model.embedded import sprout_folder


@contextmanager
def same_weights(options: Options) -> Iterator[tuple[Runtime, PreTrainedModel, Any]]:
    """sprout, or the model of `--model`, as a loaded runtime and as a model and tokenizer of transformers; float32."""
    name = options.model or "sprout"
    path = str(sprout_folder()) if name == "sprout" else name
    with quiet(), Runtime(name, dtype="float32") as runtime:
        runtime.load()
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        yield runtime, model, AutoTokenizer.from_pretrained(path)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the baselines' warnings about their own settings out of the table."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def text_pipeline(model: PreTrainedModel, tokenizer: Any, max_tokens: int, batch_size: int, **options: Any) -> Any:
    """LangChain's HuggingFacePipeline, greedy, answering with exactly `max_tokens` tokens unless told otherwise."""
    settings = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False} | options
    pipe = pipeline(
        "text-generation",
        model=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        return_full_text=False,
        **settings,
    )
    pipe.tokenizer.padding_side = "left"
    return HuggingFacePipeline(pipeline=pipe, batch_size=batch_size)


def fastest_text_pipeline(
    model: PreTrainedModel, tokenizer: Any, max_tokens: int, prompts: Sequence[str], **options: Any
) -> tuple[Any, int]:
    """HuggingFacePipeline at its best batch size for `prompts`, found on a part of them, and that size."""
    some = list(prompts[:: max(1, len(prompts) // 16)])
    sizes = [size for size in (1, 4, 16) if size <= len(some)]
    made = {size: text_pipeline(model, tokenizer, max_tokens, size, **options) for size in sizes}
    best = min(sizes, key=lambda size: timed(lambda: made[size].batch(some), f"batch_size={size}, {len(some)} prompts"))
    return made[best], best


def chat_pipeline(model: PreTrainedModel, tokenizer: Any, max_tokens: int, **options: Any) -> ChatHuggingFace:
    """LangChain's ChatHuggingFace, which runs one conversation at a time."""
    llm = text_pipeline(model, tokenizer, max_tokens, 1, **options)
    return ChatHuggingFace(llm=llm, tokenizer=tokenizer)


def rendered(tokenizer: Any, chat: Sequence[tuple[str, str]]) -> str:
    """Return the prompt of a chat in LangChain's short form, as ChatHuggingFace renders it."""
    roles = {"human": "user", "ai": "assistant"}
    messages = [{"role": roles.get(role, role), "content": text} for role, text in chat]
    prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt


def continuous_batching(model: PreTrainedModel, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """transformers' own paged continuous batching: greedy answers of exactly `max_tokens` tokens."""
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    longest = max(map(len, prompts)) + max_tokens
    page_size = 32
    batching = ContinuousBatchingConfig(
        page_size=page_size, num_blocks=len(prompts) * (longest // page_size + 2), max_batch_tokens=2048
    )
    with torch.inference_mode():
        outputs = model.generate_batch(
            list(prompts),
            generation_config=config,
            continuous_batching_config=batching,
            progress_bar=False,
            warmup=False,
        )
    by_prompt = {tuple(o.prompt_ids): list(o.generated_tokens) for o in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]
