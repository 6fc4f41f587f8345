"""DSPy's Evaluate on GraftLM and, over its own client, on `transformers serve`; nothing where that is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace

import dspy

from bench.frameworks._dspy import SETTINGS, loaded, rate
from bench.frameworks._serve import served
from bench.frameworks.dspy_evaluate import WHAT, evaluations
from bench.harness import Options, Row


def run(options: Options) -> Sequence[Row]:
    if not (importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn")):
        return []
    chat = dspy.ChatAdapter(use_json_adapter_fallback=False)
    number = options.choose(8, 150)
    with loaded(options) as (runtime, lm, folder), served(folder) as url:
        endpoint = dspy.LM(f"openai/{folder}", api_base=url, api_key="none", **SETTINGS)
        times, scores = evaluations(options, runtime, {"ours": (lm, chat), "serve": (endpoint, chat)})
    row = rate(f"{WHAT.format(number)}, against transformers serve", number, times["ours"], times["serve"])
    return [replace(row, shape={"percent_right": scores})]
