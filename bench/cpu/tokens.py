"""Greedy float32 tokens of all engines, guesses off: requests whose tokens are GraftLM's."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cpu._engines import OURS, Engines, model_folder
from bench.harness import Options, Row
from bench.models import random_ids

REQUESTS, NEW = 8, 24


def run(options: Options) -> Sequence[Row]:
    prompts = [random_ids(64, seed=i) for i in range(REQUESTS)]
    with Engines("30M", "float32", model_folder()) as engines:
        found = {name: worker.ask(prompts, NEW)["ids"] for name, worker in engines.workers.items()}
    ours = found.pop(OURS)
    rows: list[Row] = []
    for name, ids in found.items():
        same = sum(a == b for a, b in zip(ours, ids, strict=True))
        rows.append(Row("tokens", f"28M float32, the same as {name}'s", same, "requests", baseline=REQUESTS))
    return rows
