"""64 requests under 64 schemas that were never seen, beside the same requests once the schemas are known.

On a GPU if there is one, else on a clock that takes a GPU's time for each step (`bench/frameworks/_paced.py`). What a
fresh machine compiles once, the grammars' loops and the model's kernels, is ready before the first timing, and so are
the processes that compile constraints. Schemas are closed, or open (`any value` in one field, which takes a stack).
For each run a line says how many steps it took, how long requests waited for their constraints, and how long Python's
collector looked at all of memory.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.frameworks._paced import paced_runtime
from bench.grammar.first import model_of_many_tokens
from bench.harness import Options, Row, Timing, paired
from graftlm import Request, Runtime, SamplingParams
from graftlm.core.constraint import vocabulary_of
from graftlm.core.grammar import cache
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.drafting.vocabulary_image import VocabularyImage
from graftlm.core.model.load import choose_device

NUM_REQUESTS = 64
ON_GPU = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Large enough for the kernels of a GPU."""


def schema(i: int) -> dict[str, Any]:
    """A closed object of six fields that no other `i` has."""
    fields: dict[str, Any] = {
        f"name_{i}": {"type": "string", "maxLength": 8 + i % 16},
        f"kind_{i}": {"enum": [f"k{i}_{j}" for j in range(4)]},
        f"count_{i}": {"type": "integer", "minimum": 0, "maximum": 100 + i},
        f"tags_{i}": {
            "type": "array",
            "items": {"type": "string", "pattern": f"^[a-z]{{2,{4 + i % 5}}}$"},
            "maxItems": 3,
        },
        f"when_{i}": {"type": "string", "format": "date"},
        f"ok_{i}": {"type": "boolean"},
    }
    return {"type": "object", "properties": fields, "required": list(fields)}


def open_schema(i: int) -> dict[str, Any]:
    """The same with a field of any value, which takes a stack."""
    closed = schema(i)
    fields = closed["properties"] | {f"more_{i}": {"type": "object"}}
    return {"type": "object", "properties": fields, "required": list(fields)}


@contextmanager
def _runtime(model: str, device: str) -> Iterator[Runtime]:
    if device == "cuda":
        with Runtime(model, device=device, max_batch=NUM_REQUESTS) as runtime:
            yield runtime
    else:
        with paced_runtime(model, np.random.default_rng(0)) as (runtime, _):
            yield runtime


def run(options: Options) -> Iterator[Row]:
    device = choose_device("auto").type
    jit.wait()
    with tempfile.TemporaryDirectory() as folder:
        sizes = ON_GPU if device == "cuda" else {}
        model = "sprout" if options.quick else model_of_many_tokens(Path(folder), **sizes)
        name = "sprout" if options.quick else "tiny llama, 128,000 tokens"
        shape = {"requests": NUM_REQUESTS, "model": name, "device": device if device == "cuda" else "clock"}
        with _runtime(model, device) as runtime:
            vocabulary = vocabulary_of(runtime.tokenizer)
            cache.start_processes(lambda: VocabularyImage.of(vocabulary, runtime.tokenizer))  # if loading has not yet
            cache.processes.wait()
            for kind, make in (("closed", schema), ("open", open_schema)):
                times = _times(runtime, make, options.choose(1, options.repeats))
                ratios = [a / b for a, b in zip(times["cold"].samples, times["warm"].samples, strict=True)]
                ratio = statistics.median(ratios)
                what = f"{NUM_REQUESTS} requests under as many new schemas, {kind}, and under the same again"
                yield Row("cold", what, times["cold"].median, "s", times["warm"].median, ratio, 1.2, True, shape=shape)


class _Collector:
    """Seconds that collections of the oldest generation took."""

    def __init__(self) -> None:
        self.seconds = self._since = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            now = time.perf_counter()
            self.seconds, self._since = self.seconds + (now - self._since if phase == "stop" else 0.0), now


def _times(runtime: Runtime, make: Callable[[int], dict[str, Any]], repeats: int) -> dict[str, Timing]:
    generation = 0
    collector = _Collector()

    def ask(first: int) -> None:
        before, collected_s = runtime.stats().steps, collector.seconds
        requests = [
            Request(
                f"Record {i}:",
                SamplingParams(json_schema=make(first + i), max_tokens=128, temperature=1.0, seed=i),
            )
            for i in range(NUM_REQUESTS)
        ]
        done = [future.result() for future in runtime.submit_many(requests)]
        waited = sorted(1e3 * completion.timing.queue_s for completion in done if completion.timing is not None)
        print(
            f"  {runtime.stats().steps - before} steps; waited p50 {waited[len(waited) // 2]:.0f} ms, longest "
            f"{waited[-1]:.0f} ms; whole collections {1e3 * (collector.seconds - collected_s):.0f} ms",
            file=sys.stderr,
            flush=True,
        )

    def cold() -> None:
        nonlocal generation
        generation += NUM_REQUESTS
        ask(generation)

    return paired({"cold": cold, "warm": lambda: ask(generation)}, repeats)
