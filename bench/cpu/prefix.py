"""32 requests that share 1,000 tokens: each rival receives the shared prefix explicitly, GraftLM detects it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.cpu._engines import Engines, Worker, chosen, compared, model_folder
from bench.cpu._models import Precision
from bench.harness import Options, Row
from bench.models import Size, random_ids

FLOORS: dict[tuple[Size, Precision], float] = {("30M", "float32"): 1.5, ("450M", "bfloat16"): 1.3}
REQUESTS, SHARED, OWN, NEW = 32, 1000, 24, 32


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    folder = model_folder()
    for (size, precision), floor in chosen(FLOORS, options):
        with Engines(size, precision, folder) as engines:
            rates = rates_of(engines.workers, options.repeats)
            rows += compared("prefix", f"{engines.label}, {REQUESTS} over {SHARED:,}", rates, floor, "requests/s")
    return rows


def rates_of(workers: Mapping[str, Worker], repeats: int) -> dict[str, list[float]]:
    """Return requests a second of each engine, round by round, after one that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in workers}
    for repeat in range(-1, repeats):
        shared = random_ids(SHARED, seed=10_000 + repeat)
        prompts = [shared + random_ids(OWN, seed=100 * (repeat + 2) + i) for i in range(REQUESTS)]
        for name, worker in workers.items():
            seconds = worker.ask(prompts, NEW, shared=SHARED)["seconds"]
            if repeat >= 0:
                rates[name].append(REQUESTS / seconds)
    return rates
