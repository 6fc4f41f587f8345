"""Text of the embedded model with speculation: GraftLM with and without, beside the better rival."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.cpu._engines import OURS, Engines, compared, model_folder
from bench.harness import ROOT, Options, Row

TEXTS = (
    "Mara is 31 and lives in Oslo. Leo is 27 and lives in Lima. Mara is 31 and lives in",
    "The train leaves at nine. When does the train leave? The train",
    "Name: Leo. Age: 27. City: Lima.\nName: Mara. Age: 31. City: Oslo.\nName:",
)
NEW = 48


def run(options: Options) -> Sequence[Row]:
    model = model_folder() / "sprout"  # a copy: the rivals' files are written into it
    shutil.copytree(ROOT / "graftlm" / "sprout", model, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    rates: dict[str, list[float]] = {}
    guessed: list[float] = []
    with Engines("tiny", "float32", Path(), model=model) as engines:
        for repeat in range(-1, options.repeats):
            for name, worker in engines.workers.items():
                seconds = sum(worker.ask([prompt], NEW)["seconds"] for prompt in prompts)
                if repeat >= 0:
                    rates.setdefault(name, []).append(len(prompts) * NEW / seconds)
        ours = engines.workers[OURS]  # measured in rounds of its own: two runtimes would share the cores
        for repeat in range(-1, options.repeats):
            seconds = sum(ours.ask([prompt], NEW, speculation="auto")["seconds"] for prompt in prompts)
            if repeat >= 0:
                guessed.append(len(prompts) * NEW / seconds)
    rows = compared("guesses", f"{engines.label}, off", rates, None, "tok/s")
    plain = statistics.median(rates[OURS])
    median = statistics.median(guessed)
    what = f"{engines.label}, on, {OURS} (baseline: off)"
    low, high = min(guessed), max(guessed)
    return [*rows, Row("guesses", what, median, "tok/s", baseline=plain, ratio=median / plain, low=low, high=high)]
