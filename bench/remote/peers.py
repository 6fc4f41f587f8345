"""Peers on the same fields: DSPy's own client, and SGLang's frontend if it is installed, beside our programs.

The server is `transformers serve` with sprout. DSPy asks for all fields in one reply, which is as few calls as there
can be: programs are compared with it. SGLang's frontend is the other implementation of API speculative execution.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import dspy

import graftlm as gl
from bench.frameworks._serve import served
from bench.harness import Options, Row
from bench.remote._forms import THREE, Form, cases, chat_form, fill, json_form
from bench.remote.fields import KNOWN, NUM_SPEC_TOKENS, measure, tokenizer_of
from graftlm.core.model.description import resolve
from graftlm.core.program.program import Program

Values = Mapping[str, str]


def run(options: Options) -> Sequence[Row]:
    num = options.choose(2, 8)
    folder = str(resolve("sprout"))
    rows: list[Row] = []
    with (
        served(folder, "--dtype", "float32", num_threads=1) as url,
        gl.Runtime(folder, base_url=url, tokenizer=tokenizer_of(folder), capabilities=KNOWN, max_in_flight=4) as rt,
    ):
        rows += _beside_dspy(url, folder, rt, num)
        if find_spec("sglang") is not None:
            rows += _beside_sglang(url, folder, rt, num)
    return rows


def _beside_dspy(url: str, folder: str, rt: gl.Runtime, num: int) -> list[Row]:
    lm = dspy.LM(f"openai/{folder}", api_base=url, api_key="none", temperature=0, max_tokens=128, cache=False)
    values = []
    for seed in range(num):
        keys, people = cases(THREE, seed)
        given = {name: (str, dspy.InputField()) for name in ("text", "name")}
        wanted = {key: (str, dspy.OutputField()) for key in keys}
        predict = dspy.Predict(dspy.Signature(given | wanted, "Extract the fields from the text."))
        predict.demos = [dspy.Example(**person) for person in people[:3]]
        with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
            made = predict(text=people[3]["text"], name=people[3]["name"])
        values.append({key: made[key] for key in keys})
    tokens = sum(entry["usage"]["prompt_tokens"] for entry in lm.history)
    ours, spent = measure(rt, [chat_form(THREE, seed) for seed in range(num)], NUM_SPEC_TOKENS)
    what = "3 fields, turns, beside dspy.LM"
    equal = sum(a == b for a, b in zip(ours, values, strict=True))
    return [
        Row("peers", f"{what}: calls", spent.api_calls, "calls", len(lm.history)),
        Row("peers", f"{what}: prompt tokens", spent.prompt_tokens, "tokens", tokens),
        Row("peers", f"{what}: equal values", equal, "programs", num),
    ]


def _beside_sglang(url: str, folder: str, rt: gl.Runtime, num: int) -> list[Row]:
    rows = []
    forms = [json_form(THREE, seed) for seed in range(num)]
    expected, _ = measure(rt, forms, None)
    for num_spec_tokens in (None, NUM_SPEC_TOKENS):
        values, calls = _sglang(url, folder, forms, num_spec_tokens)
        program = Program(fill.function, num_api_spec_tokens=num_spec_tokens, sampling={"temperature": 0})
        states = program.batch([{"form": form} for form in forms], runtime=rt)
        ours = [state.variables for state in states]
        num_calls = sum(state.usage.api_calls for state in states)
        what = f"3 fields, JSON, beside SGLang's frontend, {'with' if num_spec_tokens else 'without'} speculation"
        right = [sum(a == b for a, b in zip(side, expected, strict=True)) for side in (ours, values)]
        rows += [
            Row("peers", f"{what}: calls", num_calls, "calls", calls),
            Row("peers", f"{what}: values as without speculation here", right[0], "programs", right[1]),
        ]
    return rows


def _sglang(url: str, folder: str, forms: Sequence[Form], num_spec_tokens: int | None) -> tuple[list[Values], int]:
    """Return the values of SGLang's frontend and the number of its requests."""
    sgl = importlib.import_module("sglang")
    # The client wants OpenAI's vocabulary, a download, for biases that no gen here has: one of bytes in its place.
    tiktoken, registry = importlib.import_module("tiktoken"), importlib.import_module("tiktoken.registry")
    ranks = {bytes([i]): i for i in range(256)}
    registry.ENCODINGS["cl100k_base"] = tiktoken.Encoding(
        "bytes", pat_str="(?s).", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}
    )
    requests: list[str] = []
    handler = _Requests(requests)
    logger = logging.getLogger("httpx")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    backend = sgl.OpenAI(folder, is_chat_model=False, base_url=url, api_key="none")

    def function(s: Any, form: Form) -> None:
        s += form.text
        for given, field, stop in form.parts:
            s += given
            if field is not None:
                s += sgl.gen(field, max_tokens=16, stop=stop)

    program: Any = sgl.function(function, num_api_spec_tokens=num_spec_tokens)
    values: list[Values] = []
    for form in forms:
        try:
            state = program.run(form=form, backend=backend, temperature=0)
            values.append({field: state[field] for _, field, _ in form.parts if field is not None})
        except Exception as error:  # a failure is a result, too
            values.append({"error": repr(error)[:200]})
    logger.removeHandler(handler)
    return values, len(requests)


class _Requests(logging.Handler):
    """Counts the lines that the HTTP client logs for requests."""

    def __init__(self, requests: list[str]) -> None:
        super().__init__()
        self._requests = requests

    def emit(self, record: logging.LogRecord) -> None:
        if "HTTP Request: POST" in record.getMessage():
            self._requests.append(record.getMessage())
