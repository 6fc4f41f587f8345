"""Peak memory of a process that loads a model and answers once; GraftLM's beside the weights' bytes.

The first process that loads a model has transformers build it and compares; later ones build it from the cache
folder. Both are measured, with a cache folder that is empty at first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from unittest import mock

from bench.cpu._engines import OURS, Engines, model_folder
from bench.harness import Options, Row
from bench.models import Size, random_ids

MIB = 1 << 20
REST = 350
"""MiB beyond weights and KV pool that GraftLM may take."""
FIRST_REST = 600
"""Allowed MiB in the first process, which imports transformers and temporarily holds two models."""


def run(options: Options) -> Sequence[Row]:
    size: Size = "30M" if options.quick else "450M"
    rows: list[Row] = []
    folder = model_folder()
    with TemporaryDirectory() as cache, mock.patch.dict(os.environ, GRAFTLM_CACHE_DIR=cache):
        for process, rest in (("first", FIRST_REST), ("later", REST)):
            with Engines(size, "bfloat16", folder) as engines:
                weights = sum(file.stat().st_size for file in (folder / size).glob("*.safetensors")) / 2 / MIB
                for name, worker in engines.workers.items():
                    if process == "first" and name != OURS:
                        continue
                    peak = worker.ask([random_ids(64, seed=1)], 2)["peak_mib"]
                    # the pool grows with use: 66 tokens take less than a MiB of it
                    floor = weights + rest if name == OURS else None
                    what = f"{engines.label}, peak, {name}" + (f", {process} process" if name == OURS else "")
                    rows.append(Row("memory", what, peak, "MiB", baseline=weights, floor=floor, at_most=True))
    return rows
