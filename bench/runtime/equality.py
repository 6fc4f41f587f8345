"""Greedy float32 tokens against `generate` of transformers, by architecture and by schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.harness import Options, Row
from bench.models import GREEDY, random_ids
from graftlm import CacheConfig, Runtime
from tests.models import byte_tokenizer, greedy_reference, tiny_model

KINDS = ("llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2")
NUM_NEW = 24


def prompts() -> list[list[int]]:
    """Return ragged prompts, some with a common prefix."""
    common = random_ids(40, seed=5)
    own = [random_ids(n, seed=n) for n in (3, 17, 60)]
    return [*own, common + own[0], common + own[1], common[:20] + own[2], common, common + own[0] + own[1]]


def one_by_one(engine: Runtime, asked: list[list[int]]) -> list[list[int]]:
    return [engine.generate(prompt, max_tokens=NUM_NEW, **GREEDY).token_ids for prompt in asked]


def at_once(engine: Runtime, asked: list[list[int]]) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(asked, max_tokens=NUM_NEW, **GREEDY)]


def twice(engine: Runtime, asked: list[list[int]]) -> list[list[int]]:
    at_once(engine, asked)
    return at_once(engine, asked)


def from_threads(engine: Runtime, asked: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda prompt: engine.generate(prompt, max_tokens=NUM_NEW, **GREEDY).token_ids, asked))


Way = Callable[[Runtime, list[list[int]]], list[list[int]]]
WAYS: dict[str, tuple[Way, dict[str, object]]] = {
    "alone": (one_by_one, {"cache": CacheConfig(enabled=False)}),
    "batched": (at_once, {}),
    "cached": (twice, {}),
    "chunked": (at_once, {"max_step_tokens": 16}),
    "evicting": (twice, {"cache": CacheConfig(max_tokens=192)}),
    "16 threads": (from_threads, {}),
}


def run(options: Options) -> Sequence[Row]:
    rows = []
    asked = prompts()
    for kind in options.choose(KINDS[:3], KINDS):
        reference = tiny_model(kind)
        expected = [greedy_reference(reference, prompt, NUM_NEW) for prompt in asked]
        equal = 0
        for way, settings in WAYS.values():
            with Runtime(tiny_model(kind), tokenizer=byte_tokenizer(), dtype="float32", **settings) as engine:
                equal += sum(a == b for a, b in zip(way(engine, asked), expected, strict=True))
        total = len(asked) * len(WAYS)
        rows.append(Row("equality", f"{kind}: {', '.join(WAYS)}", equal, f"of {total} equal", floor=total))
    return rows
