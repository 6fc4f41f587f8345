"""Greedy float32 tokens of a GGUF file against transformers' from the same file, in six ways to ask.

The file is that of `bench cpu quantised`; the prompts are pieces of this project's documents, every tenth one a
continuation of the piece before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoModelForCausalLM

from bench.cpu.quantised import chosen_file
from bench.harness import ROOT, Options, Row
from bench.models import GREEDY
from bench.runtime.equality import NUM_NEW, WAYS, at_once, one_by_one, twice
from graftlm import CacheConfig, Runtime
from tests.models import greedy_reference

LENGTHS = (7, 33, 60, 12, 90)
"""Tokens of the prompts, in turns."""


def forked(engine: Runtime, asked: list[list[int]]) -> list[list[int]]:
    """Let two sequences go on from each prompt; one of both that differs is returned."""
    found = []
    for prompt in asked:
        answers = engine.generate(prompt, n=2, max_tokens=NUM_NEW, **GREEDY)
        one, two = (list(answer.token_ids) for answer in answers.completions)
        found.append(one if one == two else two)
    return found


ASKED = {
    "alone": (one_by_one, WAYS["alone"][1]),
    "batch": (at_once, {}),
    "cached": (twice, {}),
    "chunked": (at_once, {"max_step_tokens": 16}),
    "evicted": (twice, {"cache": CacheConfig(max_tokens=1024)}),
    "forked": (forked, {}),
}


def run(options: Options) -> Iterator[Row]:
    path = chosen_file()
    count = options.count or options.choose(10, 100)
    settings = {"device": "cpu", "dtype": "float32", "quiet": True}
    with Runtime(str(path), **settings) as runtime:
        asked = _prompts(runtime, count)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
    expected = [greedy_reference(reference, prompt, NUM_NEW) for prompt in asked]
    del reference
    for name, (way, more) in ASKED.items():
        with Runtime(str(path), **settings, **more) as runtime:
            equal = sum(list(a) == b for a, b in zip(way(runtime, asked), expected, strict=True))
        yield Row("gguf_equality", f"{path.stem}, {name}", equal, f"of {count} equal", floor=count)


def _prompts(runtime: Runtime, count: int) -> list[list[int]]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    ids = runtime.tokenizer.encode(text[: 800 * count])
    prompts: list[list[int]] = []
    at = 0
    for i in range(count):
        length = LENGTHS[i % len(LENGTHS)]
        piece = ids[at : at + length]
        prompts.append(prompts[-1] + piece if i % 10 == 9 else piece)
        at += length
    return prompts
