"""Decode steps of 1, 8 and 32 requests, guesses off: tokens a second without the prompts, beside the better rival."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cpu._engines import Engines, chosen, compared, model_folder
from bench.cpu._models import Precision
from bench.harness import Options, Row
from bench.models import Size, random_ids

FLOORS: dict[tuple[Size, Precision], tuple[float, float, float]] = {
    ("30M", "float32"): (1.0, 1.1, 1.1),
    ("30M", "bfloat16"): (0.9, 1.0, 1.0),
    ("450M", "float32"): (1.05, 1.05, 1.05),
    ("450M", "bfloat16"): (1.0, 1.0, 1.0),
}
BATCHES = 1, 8, 32
PROMPT = 64


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    if options.batch not in (None, *BATCHES):
        raise SystemExit(f"--batch {options.batch} is none of: {', '.join(map(str, BATCHES))}")
    folder = model_folder()
    for (size, precision), floors in chosen(FLOORS, options):
        num_new = options.choose(16, 48 if size == "30M" else 16)
        with Engines(size, precision, folder) as engines:
            for batch, floor in zip(BATCHES, floors, strict=True):
                if options.batch not in (None, batch):
                    continue
                rates = rates_of(engines, batch, num_new, options.repeats)
                rows += compared("decode", f"{engines.label}, batch {batch}", rates, floor, "tok/s")
    return rows


def rates_of(
    engines: Engines, batch: int, num_new: int, repeats: int, *, prompt: int = PROMPT
) -> dict[str, list[float]]:
    """Return tokens a second of each engine, round by round, without the first token's time.

    prompt  tokens of each prompt
    """
    rates: dict[str, list[float]] = {name: [] for name in engines.workers}
    for repeat in range(-1, repeats):  # one round that is not counted
        prompts = [random_ids(prompt, seed=1000 * (repeat + 2) + i) for i in range(batch)]
        for name, worker in engines.workers.items():
            first = worker.ask(prompts, 1)["seconds"]
            seconds = worker.ask(prompts, num_new + 1)["seconds"] - first
            if repeat >= 0:
                rates[name].append(batch * num_new / seconds)
    return rates
