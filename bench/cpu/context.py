"""Long contexts: tokens a second after 4,000 others, and a prompt of 8,000, beside the better rival."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cpu import decode, prefill
from bench.cpu._engines import Engines, chosen, compared, model_folder
from bench.cpu._models import Precision
from bench.harness import Options, Row
from bench.models import Size

FLOORS: dict[tuple[Size, Precision], float] = {("30M", "float32"): 1.0, ("30M", "bfloat16"): 1.0}
PAST, PROMPT, NEW = 4000, 8000, 32


def run(options: Options) -> Sequence[Row]:
    rows: list[Row] = []
    folder = model_folder()
    for (size, precision), floor in chosen(FLOORS, options):
        with Engines(size, precision, folder) as engines:
            after = decode.rates_of(engines, 1, NEW, options.repeats, prompt=PAST)
            rows += compared("context", f"{engines.label}, decode after {PAST:,} tokens", after, floor, "tok/s")
            prompts = prefill.rates_of(engines, PROMPT, options.repeats)
            rows += compared("context", f"{engines.label}, prompt of {PROMPT:,}", prompts, floor, "tok/s")
    return rows
