"""64 requests under 64 schemas that were never seen, beside the same requests once the schemas are known.

On a GPU if there is one. What a fresh machine compiles once, the grammars' loops and the model's kernels, is ready
before the first timing.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.grammar.first import model_of_many_tokens
from bench.harness import Options, Row, paired
from graftlm import Request, Runtime, SamplingParams
from graftlm.core.grammar.automata import jit
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


def run(options: Options) -> Sequence[Row]:
    device = choose_device("auto").type
    jit.wait()
    with tempfile.TemporaryDirectory() as folder:
        sizes = ON_GPU if device == "cuda" else {}
        model = "sprout" if options.quick else model_of_many_tokens(Path(folder), **sizes)
        with Runtime(model, device=device, max_batch=NUM_REQUESTS) as runtime:
            generation = 0

            def ask(first: int) -> None:
                requests = [
                    Request(
                        f"Record {i}:",
                        SamplingParams(json_schema=schema(first + i), max_tokens=128, temperature=1.0, seed=i),
                    )
                    for i in range(NUM_REQUESTS)
                ]
                for future in runtime.submit_many(requests):
                    future.result()

            def cold() -> None:
                nonlocal generation
                generation += NUM_REQUESTS
                ask(generation)

            def warm() -> None:
                ask(generation)

            times = paired({"cold": cold, "warm": warm}, options.choose(1, options.repeats))
        ratio = statistics.median(a / b for a, b in zip(times["cold"].samples, times["warm"].samples, strict=True))
        what = f"{NUM_REQUESTS} requests under as many new schemas, and under the same again"
        name = "sprout" if options.quick else "tiny llama, 128,000 tokens"
        shape = {"requests": NUM_REQUESTS, "model": name, "device": device}
        return [Row("cold", what, times["cold"].median, "s", times["warm"].median, ratio, 1.2, True, shape=shape)]
