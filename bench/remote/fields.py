"""Calls and prompt tokens of programs of three and eight fields: with API speculative execution, and without.

The servers are `transformers serve` with sprout, written by others, which continues text but no assistant turn, and
`graftlm serve sprout`, which continues turns too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import graftlm as gl
from bench.frameworks._serve import served
from bench.harness import Options, Row
from bench.remote._forms import EIGHT, THREE, Form, chat_form, fill, json_form, json_turns
from graftlm.core.model.description import resolve
from graftlm.core.program.program import Program
from graftlm.core.remote.ledger.usage import RemoteUsage
from tests.served import started

NUM_SPEC_TOKENS = 128
NUM_PROGRAMS = {3: 8, 8: 4}
"""By the number of fields; `transformers serve` computes every prompt anew, on two cores in one to two seconds."""

FLOORS = {3: (3.0, 3.0), 8: (8.0, 5.6)}
"""By the number of fields: how many times fewer calls, and prompt tokens."""

KNOWN = {"logprobs": False, "echo": False}
"""Capabilities of `transformers serve`, which drops log-probabilities silently: declared, so that no probe runs."""

Measured = tuple[list[Any], RemoteUsage]


def measure(runtime: gl.Runtime, forms: Sequence[Form], num_spec_tokens: int | None) -> Measured:
    """Return the values of all programs, or the error of one, and the cost of all."""
    program = Program(fill.function, num_api_spec_tokens=num_spec_tokens, sampling={"temperature": 0})
    states = program.batch([{"form": form} for form in forms], runtime=runtime)
    total = sum((state.usage for state in states), start=RemoteUsage())
    assert isinstance(total, RemoteUsage)
    return [state.error or state.variables for state in states], total


def rows_of(what: str, num_fields: int, ours: Measured, plain: Measured) -> list[Row]:
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
        Row("fields", f"{name}: answers that left the layout", spent.misses.get("another text", 0), "answers"),
        Row("fields", f"{name}: completion tokens", spent.completion_tokens, "tokens", base.completion_tokens),
        Row("fields", f"{name}: equal values", equal, "programs", len(values), floor=len(values), shape=shape),
    ]


def run(options: Options) -> Iterator[Row]:
    folder = str(resolve("sprout"))
    with served(folder, "--dtype", "float32", num_threads=1) as url:
        yield from _behind("transformers serve", url, folder, options, continues_turns=False)
    with _served_here() as url:
        yield from _behind("graftlm serve", url, "sprout", options, continues_turns=True)


def _behind(server: str, url: str, model: str, options: Options, *, continues_turns: bool) -> Iterator[Row]:
    tokenizer = tokenizer_of(str(resolve("sprout")))
    settings: dict[str, Any] = {"base_url": url, "max_in_flight": 4}
    known = {**KNOWN, "logprobs": continues_turns}
    with (
        gl.Runtime(model, tokenizer=tokenizer, capabilities=known, **settings) as text,
        gl.Runtime(model, capabilities={**known, "continue_turn": "continue_final_message"}, **settings) as turns,
        gl.Runtime(model, capabilities={**known, "continue_turn": "none"}, **settings) as chat,
    ):
        for labels in options.choose((THREE,), (THREE, EIGHT)):
            seeds = range(options.choose(2, NUM_PROGRAMS[len(labels)]))

            def rows(form: str, ours: Measured, plain: Measured, num: int = len(labels)) -> list[Row]:
                return rows_of(f"{server}, {form}", num, ours, plain)

            forms = [json_form(labels, seed) for seed in seeds]
            yield from rows("JSON, text", measure(text, forms, NUM_SPEC_TOKENS), measure(text, forms, None))
            for layout, form_of in (("JSON", json_turns), ("markers", chat_form)):
                forms = [form_of(labels, seed) for seed in seeds]
                plain = measure(text, forms, None)
                yield from rows(f"{layout}, turns, text", measure(text, forms, NUM_SPEC_TOKENS), plain)
                yield from rows(f"{layout}, turns, chat alone", measure(chat, forms, NUM_SPEC_TOKENS), plain)
                if continues_turns:
                    continued = measure(turns, forms, NUM_SPEC_TOKENS)
                    yield from rows(f"{layout}, turns, continued", continued, measure(turns, forms, None))


@contextmanager
def _served_here() -> Iterator[str]:
    options = ("sprout", "--option", "dtype=float32")
    with TemporaryDirectory() as folder, started(Path(folder), *options, OMP_NUM_THREADS="1") as server:
        server.wait_ready()
        yield f"{server.url}/v1"


def tokenizer_of(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
