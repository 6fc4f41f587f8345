"""The demo: a stock pipeline of each framework, on plain transformers and on GraftLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from graftlm.ab import Comparison, compare
from graftlm.core.errors import ConfigError
from graftlm.machine import version_of
from graftlm.progress import Progress

PIPELINES = Path(__file__).parent / "pipelines"
ENGINES = ("hf", "graftlm")
ROUNDS, MINUTES = 2, 0.3
"""Rounds after the first, which counts too: three in all give an interval. And the minutes after which none begins."""
DTYPE = "float32"
"""The dtype in which greedy answers do not depend on the batch, so that equal answers are promised."""

PACKAGES = {
    "dspy": ("dspy",),
    "guidance": ("guidance",),
    "langchain": ("langchain-core", "langchain-huggingface"),
    "llama_index": ("llama-index-core", "llama-index-llms-huggingface"),
}
"""Packages of each framework and of its own class over transformers."""


def run(model: str, frameworks: Sequence[str], progress: Progress) -> list[Comparison]:
    """Compare each framework's pipeline on both engines.

    Raises: ConfigError for a framework without a pipeline, or one that is not installed.
    """
    if unknown := [name for name in frameworks if name not in PACKAGES]:
        raise ConfigError(f"no demo for {unknown[0]!r}; there is one for each of: {', '.join(PACKAGES)}")
    missing = {name: [one for one in PACKAGES[name] if version_of(one) is None] for name in frameworks}
    if needed := [one for packages in missing.values() for one in packages]:
        others = ",".join(name for name in frameworks if not missing[name])
        left = f", or run the others with --frameworks {others}" if others else ""
        raise ConfigError(f"the demo needs packages that are not installed: pip install {' '.join(needed)}{left}")
    return [
        compare(
            PIPELINES / f"{name}.py", ENGINES, model, rounds=ROUNDS, minutes=MINUTES, progress=progress,
            is_watched=False, narrows=False, dtype=DTYPE,
        )
        for name in frameworks
    ]  # fmt: skip


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Return notes that explain the table."""
    told = [
        "- hf: the framework's own class on plain transformers; graftlm: the same file with another constructor line.",
        "- ratio: median of the wall time of hf over this engine's, in interleaved rounds, with its 95 % interval.",
        "- equal: the answer is that of hf. Each engine runs in a process of its own.",
    ]
    if any(c.name == "guidance" for c in comparisons):
        told.append(
            "- guidance: its own Transformers class fails on current transformers; one call of it (crop) is mended "
            "here. That class keeps the KV of the last program, hence its hit rate."
        )
    return told
