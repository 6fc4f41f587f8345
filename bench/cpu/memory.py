"""The most memory of a process that loads a model and answers once; GraftLM's beside the weights' own bytes."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cpu._engines import OURS, Engines, model_folder
from bench.harness import Options, Row
from bench.models import Size, random_ids

MIB = 1 << 20
REST = 350
"""MiB beyond weights and KV pool that GraftLM may take."""


def run(options: Options) -> Sequence[Row]:
    size: Size = "30M" if options.quick else "450M"
    rows: list[Row] = []
    folder = model_folder()
    with Engines(size, "bfloat16", folder) as engines:
        weights = sum(file.stat().st_size for file in (folder / size).glob("*.safetensors")) / 2 / MIB
        for name, worker in engines.workers.items():
            peak = worker.ask([random_ids(64, seed=1)], 2)["peak_mib"]
            # the pool grows with use: 66 tokens take less than a MiB of it
            floor = weights + REST if name == OURS else None
            what = f"{engines.label}, peak, {name}"
            rows.append(Row("memory", what, peak, "MiB", baseline=weights, floor=floor, at_most=True))
    return rows
