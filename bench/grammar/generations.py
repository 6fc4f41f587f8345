"""Random outputs under collected schemas and random budgets, each validated by jsonschema, with formats.

    python -m bench grammar generations --folder DIR [--sample N] [--count TEXTS]

Folders are those of `collections`. Every schema is written half the time with `strict=True` and half with `False`, over
single bytes; numbers are bounded, as in requests.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import localcontext
from typing import Any

import numpy as np

from bench.grammar.collections import groups
from bench.grammar.suite import BYTES
from bench.grammar.validity import exact, write
from bench.harness import Options, Row
from graftlm import Grammar, GrammarError, JsonSchema
from graftlm.core.grammar.matcher import NO_ENDING

_JUDGED_S = 20


def wrong(schema: Any, data: bytes, documents: dict[str, Any] | None = None) -> str | None:
    """Return jsonschema's complaint about `data`, or None; raise TimeoutError if a pattern takes too long."""
    from graftlm.core.grammar.schema.validator import validator

    value = json.loads(data, parse_float=exact)
    with localcontext(prec=1000):
        found = validator(json.dumps(schema), json.dumps(documents or {}), exact=True).iter_errors(value)
        error = next(iter(found), None)
    return None if error is None else f"{list(error.absolute_path)}: {error.message[:200]}"


def texts(schema: Any, num_texts: int, rng: np.random.Generator, **options: Any) -> Iterator[tuple[bytes, int]]:
    """Return `count` outputs of `schema` with their token budgets."""
    grammar = Grammar.compile(JsonSchema(schema), BYTES, bounded_numbers=True, **options)
    least = grammar.matcher().min_tokens_to_accept()
    if least >= NO_ENDING:
        raise GrammarError("no text was found that completes the constraint")  # as for a request
    for i in range(num_texts):
        budget = max(1, least + int(rng.integers(0, 40 if i % 2 else 200)))
        yield write(grammar, BYTES, rng, budget)[0], budget


def judge(name: str, schema: Any, num_texts: int, rng: np.random.Generator) -> tuple[int, int, list[str]]:
    """Return the number of validated outputs, the number without a verdict, and the violations."""
    num_judged = num_unjudged = 0
    failures = []
    for strict in (True, False):
        try:
            for data, budget in texts(schema, (num_texts + strict) // 2, rng, strict=strict):
                try:
                    with _at_most(_JUDGED_S):
                        reason = wrong(schema, data)
                except TimeoutError:
                    num_unjudged += 1
                    continue
                except ValueError as error:
                    reason = f"no JSON: {error}"
                num_judged += 1
                if reason is not None:
                    failures.append(f"{name} (strict={strict}, budget {budget}): {data[:300]!r}: {reason}")
        except GrammarError:
            continue
    return num_judged, num_unjudged, failures


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(options: Options) -> Sequence[Row]:
    found = [group for folder in options.folders for group in groups(folder, options.choose(50, options.sample))]
    if not found:
        print("give schemas by --folder")
        return []
    num_texts = options.count or options.choose(200, 20_000)
    rng, each = np.random.default_rng(0), max(2, -(-num_texts // len(found)))
    num_judged = num_unjudged = 0
    failures: list[str] = []
    for i, (name, schema, _) in enumerate(found, 1):
        judged, unjudged, failed = judge(name, schema, each, rng)
        num_judged, num_unjudged = num_judged + judged, num_unjudged + unjudged
        failures += failed
        for line in failed:
            print(line, flush=True)
        if i % 20 == 0:
            print(f"{i} of {len(found)} schemas: {num_judged:,} texts, {len(failures)} of them wrong", flush=True)
        if num_judged >= num_texts:
            break
    shape = {"schemas": len(found), "texts": num_judged, "not judged in time": num_unjudged}
    share = 100 * (1 - len(failures) / max(num_judged, 1))
    return [Row("generations", "valid texts", share, "%", floor=100, shape=shape)]
