"""One cold prompt of 1,024 tokens, to its first token, beside the better rival."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cpu._engines import Engines, chosen, compared, model_folder
from bench.cpu._models import Precision
from bench.harness import Options, Row
from bench.models import Size, random_ids

FLOORS: dict[tuple[Size, Precision], float | None] = {
    ("30M", "float32"): None,
    ("30M", "bfloat16"): 1.0,
    ("450M", "bfloat16"): 1.0,
}
LENGTH = 1024


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    folder = model_folder()
    for (size, precision), floor in chosen(FLOORS, options):
        with Engines(size, precision, folder) as engines:
            rates = rates_of(engines, LENGTH, options.repeats)
            rows += compared("prefill", f"{engines.label}, {LENGTH:,} tokens", rates, floor, "tok/s")
    return rows


def rates_of(engines: Engines, length: int, repeats: int) -> dict[str, list[float]]:
    """Return prompt tokens a second of each engine, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in engines.workers}
    for repeat in range(-1, repeats):  # one round that is not counted
        prompts = [random_ids(length, seed=repeat + 2)]
        for name, worker in engines.workers.items():
            seconds = worker.ask(prompts, 1)["seconds"]
            if repeat >= 0:
                rates[name].append(length / seconds)
    return rates
