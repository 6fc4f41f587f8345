"""Calls and prompt tokens of programs of three and eight fields: with API speculative execution, and without.

The server is `transformers serve` with sprout, written by others, which continues text but no assistant turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import graftlm as gl
from bench.frameworks._serve import served
from bench.harness import Options, Row
from bench.remote._forms import EIGHT, THREE, Form, chat_form, fill, json_form
from graftlm.core.model.load import resolve
from graftlm.core.program.program import Program
from graftlm.core.remote.ledger.usage import RemoteUsage

NUM_SPEC_TOKENS = 128
FLOORS = {3: (3.0, 3.0), 8: (8.0, 5.6)}
"""By the number of fields: how many times fewer calls, and prompt tokens."""

KNOWN = {"logprobs": False, "echo": False}
"""This server drops log-probabilities without a word; known, so that no probe is among the calls."""


def measure(runtime: gl.Runtime, forms: Sequence[Form], num_spec_tokens: int | None) -> tuple[list[Any], RemoteUsage]:
    """The values of all programs, or what went wrong in one, and the bill of all."""
    program = Program(fill.function, num_api_spec_tokens=num_spec_tokens, sampling={"temperature": 0})
    states = program.batch([{"form": form} for form in forms], runtime=runtime)
    total = sum((state.usage for state in states), start=RemoteUsage())
    assert isinstance(total, RemoteUsage)
    return [state.error or state.variables for state in states], total


def rows_of(what: str, num_fields: int, ours: tuple[Any, RemoteUsage], plain: tuple[Any, RemoteUsage]) -> list[Row]:
    (values, spent), (expected, base) = ours, plain
    shape = {"fields": num_fields, "programs": len(values), "spec_tokens": NUM_SPEC_TOKENS}
    calls, tokens = FLOORS[num_fields]
    name = f"{num_fields} fields, {what}"
    equal = sum(a == b for a, b in zip(values, expected, strict=True))

    def times(label: str, a: int, b: int, floor: float) -> Row:
        return Row("fields", f"{name}: {label}", a, label, b, ratio=b / a, floor=floor, shape=shape)

    return [
        times("calls", spent.api_calls, base.api_calls, calls),
        times("prompt tokens", spent.prompt_tokens, base.prompt_tokens, tokens),
        Row("fields", f"{name}: completion tokens", spent.completion_tokens, "tokens", base.completion_tokens),
        Row("fields", f"{name}: equal values", equal, "programs", len(values), floor=len(values), shape=shape),
    ]


def run(options: Options) -> Sequence[Row]:
    num = options.choose(2, 16)
    folder = str(resolve("sprout"))
    rows: list[Row] = []
    with served(folder) as url:
        settings: dict[str, Any] = {"base_url": url, "max_in_flight": 4}
        with (
            gl.Runtime(folder, tokenizer=tokenizer_of(folder), capabilities=KNOWN, **settings) as text,
            gl.Runtime(folder, capabilities={**KNOWN, "continue_turn": "none"}, **settings) as chat,
        ):
            for labels in options.choose((THREE,), (THREE, EIGHT)):
                forms = [json_form(labels, seed) for seed in range(num)]
                plain = measure(text, forms, None)
                rows += rows_of("JSON, text", len(labels), measure(text, forms, NUM_SPEC_TOKENS), plain)
                forms = [chat_form(labels, seed) for seed in range(num)]
                plain = measure(text, forms, None)
                rows += rows_of("turns, text", len(labels), measure(text, forms, NUM_SPEC_TOKENS), plain)
                rows += rows_of("turns, chat alone", len(labels), measure(chat, forms, NUM_SPEC_TOKENS), plain)
    return rows


def tokenizer_of(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
