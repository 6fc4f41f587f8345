"""The model and sizes of the cases: an 8B shape with random weights on a GPU, a tiny model elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from bench.harness import Options
from bench.models import Size, random_ids, random_model
from graftlm import CacheConfig, Request, Runtime, SamplingParams
from tests.models import byte_tokenizer


class Sizes(NamedTuple):
    """Chats of several turns: tokens of the first text, of each later one and of an answer."""

    chats: int
    turns: int
    first: int
    said: int
    answer: int

    @property
    def total(self) -> int:
        """Tokens of all chats at their end."""
        return self.chats * (self.first + (self.turns - 1) * self.said + self.turns * self.answer)


def sizes(options: Options) -> list[Sizes]:
    """Chats with a short first text, and on a GPU with a document of three pages and one of eight too."""
    if torch.cuda.is_available():
        return [Sizes(64, 6, first, 200, 64) for first in (500, 1600, 4000)]
    return [Sizes(*options.choose((16, 4, 60, 30, 8), (64, 6, 60, 30, 8)))]


@cache
def _model() -> Any:
    from transformers import AutoConfig

    from bench.gpu.shape_engines import GraftLMShape
    from bench.gpu.shapes import SHAPES

    shape = dict(SHAPES["llama3-8b"])
    return GraftLMShape(AutoConfig.for_model(shape.pop("model_type"), **shape), 8192).model


@contextmanager
def opened(size: Size = "tiny", **cache_options: Any) -> Iterator[Runtime]:
    """Open a runtime with these options of the cache; on a GPU one at a time. size: of the model elsewhere"""
    with Runtime(
        _model() if torch.cuda.is_available() else random_model(size),
        tokenizer=byte_tokenizer(),
        max_model_len=8192,
        max_batch=64,
        quiet=True,
        cache=CacheConfig(dtype="model", **cache_options),
    ) as runtime:
        runtime.load()
        host_bytes = cache_options.get("host_bytes", 0)
        while host_bytes and runtime.stats().tiers["host"].capacity < 0.9 * host_bytes:
            time.sleep(0.1)  # a driver registers it
        yield runtime


def ask(runtime: Runtime, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Answer prompts greedily, submitted together."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return [future.result().token_ids for future in runtime.submit_many([Request(p, sampling) for p in prompts])]


def converse(runtime: Runtime, of: Sizes, seed: int = 0) -> list[list[int]]:
    """Run all turns of all chats, a turn of every chat at once. -> the chats' tokens at the end"""
    chats = [random_ids(of.first, seed=seed + i) for i in range(of.chats)]
    for turn in range(of.turns):
        answers = ask(runtime, chats, of.answer)
        chats = [chat + answer for chat, answer in zip(chats, answers, strict=True)]
        if turn < of.turns - 1:
            chats = [chat + random_ids(of.said, seed=seed + 7919 * (turn + 1) + i) for i, chat in enumerate(chats)]
    return chats
