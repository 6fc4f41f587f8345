"""CPU time to compile a constraint over 128,000 tokens, beside llguidance and xgrammar on the same constraints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.grammar import _constraints, _engines, _vocabularies
from bench.harness import Options, Row
from graftlm import Grammar, JsonSchema, Vocabulary


def cpu_times(compile_one: Callable[[Any], object], schemas: Sequence[Any], repeats: int) -> np.ndarray:
    """Return CPU milliseconds for each schema: the median of `repeats` runs after an uncounted one."""
    times = np.zeros((repeats + 1, len(schemas)))
    for i in range(repeats + 1):
        for j, schema in enumerate(schemas):
            started = time.process_time()
            compile_one(schema)
            times[i, j] = 1e3 * (time.process_time() - started)
    return np.median(times[1:], axis=0)


def run(options: Options) -> Sequence[Row]:
    vocabulary: Vocabulary = _vocabularies.vocabulary("128k")
    repeats = options.choose(1, options.repeats)
    xgrammar = _engines.xgrammar_compiler(vocabulary)
    engines: dict[str, Callable[[str], object]] = {
        "llguidance": lambda schema: _engines.llguidance_json(schema, vocabulary),
        "xgrammar": lambda schema: _engines.xgrammar_json(xgrammar, schema),
    }
    texts = [json.dumps(schema) for schema in _constraints.CLOSED.values()]
    rows = []
    for other, compile_other in engines.items():
        taken = [text for text in texts if _takes(compile_other, text)]
        ours = cpu_times(lambda text: Grammar.compile(JsonSchema(text), vocabulary), taken, repeats)
        theirs = cpu_times(compile_other, taken, repeats)
        shape = {"schemas": len(taken), "vocabulary": vocabulary.vocab_size}
        for name, share, floor in (("p50", 50, 2), ("p99", 99, 50)):
            mine, baseline = float(np.percentile(ours, share)), float(np.percentile(theirs, share))
            what = f"{name} of the {len(taken)} of {len(texts)} schemas that {other} takes"
            rows.append(Row("compile", what, mine, "ms CPU", baseline, floor=floor, at_most=True, shape=shape))
    return rows


def _takes(compile_one: Callable[[str], object], schema: str) -> bool:
    try:
        compile_one(schema)
    except (ValueError, RuntimeError):
        return False
    return True
