"""Runtimes over tiny models on the GPU, and what their forwards computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from graftlm.core.config import CacheConfig
from graftlm.core.runtime import Runtime
from graftlm.core.sequence import Sequence
from graftlm.kernels.wire_plan import WirePlan
from tests.models import byte_tokenizer, random_prompt, tiny_model

SHAPES = ["llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2"]
NEW = 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}


def on_gpu(kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Runtime:
    """A runtime over a tiny model, with a small pool and few graphs, so that it starts in a moment."""
    options = {"cache": CacheConfig(max_tokens=2048), "max_batch": 8, "device": "cuda"} | options
    return Runtime(tiny_model(kind).to(dtype), tokenizer=byte_tokenizer(), **options)


def family(num: int, shared: int = 40, own: int = 9) -> list[list[int]]:
    """Prompts that share a beginning, of different lengths."""
    start = random_prompt(shared, seed=1)
    return [start + random_prompt(own + i % 5, seed=100 + i) for i in range(num)]


def replace_forward(runtime: Runtime, wrap: Callable[[Any, WirePlan], torch.Tensor]) -> None:
    """Let `wrap(runner, plan)` compute every step; `type(runner).forward(runner, plan)` is what it replaces."""
    runner = runtime.load()._thread.engine.runner
    runner.forward = lambda plan: wrap(runner, plan)


def sequences_of(runtime: Runtime, plan: WirePlan, rows: Iterable[int]) -> list[Sequence]:
    """The engine's sequences that some rows of a plan belong to."""
    running = {sequence.number: sequence for sequence in runtime.load()._thread.engine.scheduler.running}
    return [running[int(plan.sequences[row])] for row in rows]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def error_of_decode(runtime: Runtime, reference: Any, num_rows: int) -> float:
    """How far logits of steps in which so many rows decode are from those of the model `reference`, relative."""
    steps: list[tuple[Any, int, torch.Tensor]] = []

    def record(runner: Any, plan: WirePlan) -> torch.Tensor:
        logits: torch.Tensor = type(runner).forward(runner, plan)
        if plan.is_decode and plan.num_rows == num_rows:
            kept = logits.float().cpu()
            sequences = sequences_of(runtime, plan, range(num_rows))
            steps.extend((sequences[i], row.kv_len, kept[i]) for i, row in enumerate(plan.rows))
        return logits

    replace_forward(runtime, record)
    runtime.generate(family(num_rows), **GREEDY)
    assert len(steps) >= (NEW - 2) * num_rows
    with torch.inference_mode():
        expected = [reference(torch.tensor([list(one.tokens[:length])])).logits[0, -1] for one, length, _ in steps]
    return relative(torch.stack([logits for _, _, logits in steps]), torch.stack(expected))


def difference_of_graphs(runtime: Runtime, num_rows: int) -> float:
    """How far replayed steps in which so many rows decode are from the same steps run eagerly, relative, at most."""
    differences: list[float] = []

    def compare(runner: Any, plan: WirePlan) -> torch.Tensor:
        assert runner.graphs, "nothing was captured"
        replayed = type(runner).forward(runner, plan).clone()
        if plan.is_decode and plan.num_rows == num_rows:
            differences.append(relative(replayed, runner.eager.forward(plan)))
        return replayed

    replace_forward(runtime, compare)
    runtime.generate(family(num_rows), **GREEDY)
    return max(differences)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "house": {"enum": ["red", "green"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "alive": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "house", "age", "alive", "tags"],
    "additionalProperties": False,
}


def satisfies_schema(text: str) -> bool:
    """Whether `text` is what SCHEMA describes, judged without this library or one for schemas."""
    value = json.loads(text)
    return (
        list(value) == ["name", "house", "age", "alive", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and value["house"] in ("red", "green")
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and type(value["alive"]) is bool
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )
