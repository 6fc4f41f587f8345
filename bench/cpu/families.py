"""Gemma 3 and a mixture of 8 of 64 experts in bfloat16 beside llama.cpp: decode of 1 and 8 requests, and a prefill."""

from __future__ import annotations

from collections.abc import Iterator

from bench.cpu._engines import Engines, compared, model_folder
from bench.cpu._models import FAMILIES, write_family
from bench.cpu.decode import rates_of as decode_rates
from bench.cpu.prefill import rates_of as prefill_rates
from bench.harness import Options, Row

BATCHES = 1, 8
LENGTH = 512
FLOOR = 1.0


def run(options: Options) -> Iterator[Row]:
    for label in FAMILIES:
        if options.model is None or options.model in label:
            yield from _measured(label, options)


def _measured(label: str, options: Options) -> Iterator[Row]:
    folder = model_folder()
    with Engines("tiny", "bfloat16", folder, write_family(label, folder), only=("llama.cpp",)) as engines:
        for batch in BATCHES:
            if options.batch in (None, batch):
                rates = decode_rates(engines, batch, options.choose(8, 32), options.repeats)
                yield from compared("families", f"{label}, decode, batch {batch}", rates, FLOOR, "tok/s")
        rates = prefill_rates(engines, LENGTH, options.repeats)
        yield from compared("families", f"{label}, prefill, {LENGTH} tokens", rates, FLOOR, "tok/s")
