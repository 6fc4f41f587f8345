"""Calls a second through each framework where the model answers at once: its own class beside the adapter.

The stock classes run a transformers model whose `generate` returns at once, the adapters such a runtime. The
rest is the cost of framework, chat template and tokenizer. CPU time, the best of four rounds.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import dspy
import torch
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from llama_index.core.llms import ChatMessage
from llama_index.llms.huggingface import HuggingFaceLLM
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, pipeline

from bench.frameworks._instant import cpu_ms, instant_runtime
from bench.frameworks._transformers import quiet
from bench.harness import Options, Row
from graftlm.ab.engines.frameworks import TransformersEngine
from graftlm.adapters.dspy import GraftLM
from graftlm.adapters.langchain import ChatGraftLM
from graftlm.adapters.llama_index import GraftLLM
from graftlm.core.model.embedded import sprout_folder

BATCH = 64
ASKED = "Mara lives in Velm. Where does Mara live?"


class AtOnce(LlamaForCausalLM):
    """A model that answers every prompt with one token."""

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        given = kwargs["input_ids"] if inputs is None else inputs
        return torch.cat((given, torch.full((len(given), 1), 70)), 1)


AtOnce.__name__ = "LlamaForCausalLM"  # pipelines check for a known name


def at_once() -> tuple[Any, Any]:
    """Return the model and sprout's tokenizer."""
    config = AutoConfig.from_pretrained(sprout_folder())
    config.num_hidden_layers = 1
    return AtOnce(config).eval(), AutoTokenizer.from_pretrained(sprout_folder())


def langchain(runtime: Any, model: Any, tokenizer: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], int]]:
    """Return the compared calls: (ours, stock, number of calls)."""
    text = pipeline("text-generation", model=model, tokenizer=tokenizer, return_full_text=False)
    stock = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=text), tokenizer=tokenizer)
    ours, many = ChatGraftLM(runtime=runtime, temperature=0), [f"{ASKED} {i}" for i in range(BATCH)]
    return {
        "ChatGraftLM.invoke beside ChatHuggingFace": (lambda: ours.invoke(ASKED), lambda: stock.invoke(ASKED), 1),
        f"the same, batch of {BATCH}": (lambda: ours.batch(many), lambda: stock.batch(many), BATCH),
    }


def llama_index(runtime: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    stock = HuggingFaceLLM(model=model, tokenizer=tokenizer, max_new_tokens=8, is_chat_model=True)
    ours, asked = GraftLLM(runtime=runtime, temperature=0), [ChatMessage(ASKED)]
    return {"GraftLLM.chat beside HuggingFaceLLM": (lambda: ours.chat(asked), lambda: stock.chat(asked), 1)}


def in_dspy(runtime: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    engine = TransformersEngine.__new__(TransformersEngine)
    engine.model, engine.tokenizer, engine.lock = model, tokenizer, contextlib.nullcontext()  # type: ignore[assignment]
    stock = dspy.LM("local/transformers", engine=engine, cache=False, max_tokens=8, temperature=0)
    ours = GraftLM(runtime=runtime, cache=False, max_tokens=8, temperature=0)
    asked = [{"role": "user", "content": ASKED}]
    return {"GraftLM beside dspy.LM over generate": (lambda: ours(messages=asked), lambda: stock(messages=asked), 1)}


def run(options: Options) -> Sequence[Row]:
    rows = []
    rounds = options.choose(64, 256)
    with quiet(), contextlib.redirect_stdout(io.StringIO()), instant_runtime(options.model or "sprout") as runtime:
        model, tokenizer = at_once()
        for make in (langchain, llama_index, in_dspy):
            for what, (ours, stock, calls) in make(runtime, model, tokenizer).items():
                times = max(2, rounds // calls)
                ours_ms, stock_ms = (
                    cpu_ms(lambda one=one, times=times: [one() for _ in range(times)], times * calls)  # type: ignore[misc]
                    for one in (ours, stock)
                )
                rows.append(
                    Row("calls", what, 1000 / ours_ms, "calls/s of CPU time", 1000 / stock_ms, stock_ms / ours_ms)
                )
    return rows
