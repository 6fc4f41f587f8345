"""Decode speed beside `generate` of transformers and beside its continuous batching, with the same weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from bench.harness import Options, Row, paired, rate_row
from bench.models import GREEDY, Size, random_ids, random_model
from graftlm import Runtime
from tests.models import PAD, byte_tokenizer

PROMPT = 64


def run(options: Options) -> Sequence[Row]:
    shapes: list[tuple[Size, torch.dtype]] = [("30M", torch.float32), ("30M", torch.bfloat16)]
    if not options.quick:
        shapes += [("450M", torch.float32), ("450M", torch.bfloat16)]
    rows: list[Row] = []
    for size, dtype in shapes:
        num_new = options.choose(16, 32) if size == "30M" else 12
        theirs = random_model(size, dtype)
        theirs.generation_config = GenerationConfig(pad_token_id=PAD)
        theirs.set_attn_implementation("sdpa")
        with Runtime(copy.deepcopy(theirs), tokenizer=byte_tokenizer()) as ours:
            ours.load()
            for batch in options.choose((1, 8), (1, 8, 32)):
                rows += _compare(theirs, ours, size, dtype, batch, num_new, options)
    return rows


def _compare(
    theirs: PreTrainedModel,
    ours: Runtime,
    size: Size,
    dtype: torch.dtype,
    batch: int,
    num_new: int,
    options: Options,
) -> Iterator[Row]:
    prompts = [random_ids(PROMPT, seed=1000 * batch + i) for i in range(batch)]
    answers: dict[str, list[list[int]]] = {}

    def graftlm() -> None:
        ours.clear_cache()
        answers["ours"] = [c.token_ids for c in ours.generate(prompts, max_tokens=num_new, **GREEDY)]

    def generate() -> None:
        with torch.inference_mode():
            output = theirs.generate(torch.tensor(prompts), max_new_tokens=num_new, do_sample=False)
        answers["theirs"] = output[:, PROMPT:].tolist()

    functions: dict[str, Callable[[], None]] = {"graftlm": graftlm, "generate": generate}
    if batch > 1:
        functions["continuous batching"] = _continuous_batching(theirs, prompts, num_new)
    times = paired(functions, options.repeats)
    name = f"{size} {str(dtype).removeprefix('torch.')}, batch {batch}"
    shape = {"prompt": PROMPT, "new": num_new, "threads": torch.get_num_threads()}
    yield rate_row(
        "decode",
        f"{name}: against generate",
        "tokens/s",
        batch * num_new,
        times["graftlm"],
        times["generate"],
        floor=1.0,
        shape=shape,
    )
    if batch > 1:
        yield rate_row(
            "decode",
            f"{name}: against continuous batching",
            "tokens/s",
            batch * num_new,
            times["graftlm"],
            times["continuous batching"],
            floor=2.0,
            shape=shape,
        )
    if dtype == torch.float32:
        equal = sum(a == b for a, b in zip(answers["ours"], answers["theirs"], strict=True))
        yield Row("decode", f"{name}: answers as generate's", equal, "answers", floor=batch)


def _continuous_batching(model: PreTrainedModel, prompts: list[list[int]], num_new: int) -> Callable[[], None]:
    config = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=PAD, eos_token_id=-1)
    pages = ContinuousBatchingConfig(num_blocks=2 * len(prompts) + 8, max_batch_tokens=2048)
    batched: Any = model

    def once() -> None:
        with _quiet():
            batched.generate_batch(
                prompts, generation_config=config, continuous_batching_config=pages, progress_bar=False
            )

    return once


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the informational lines that a batch manager logs."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
