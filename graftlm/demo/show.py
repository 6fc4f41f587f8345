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
MINUTES = 0.5
"""Minutes of rounds per framework; later rounds do not begin."""

PACKAGES = {
    "dspy": "dspy",
    "guidance": "guidance",
    "langchain": "langchain-core",
    "llama_index": "llama-index-core",
}


def run(model: str, frameworks: Sequence[str], progress: Progress) -> list[Comparison]:
    """Compare each framework's pipeline on both engines.

    Raises: ConfigError for a framework without a pipeline, or one that is not installed.
    """
    if unknown := [name for name in frameworks if name not in PACKAGES]:
        raise ConfigError(f"no demo for {unknown[0]!r}; there is one for each of: {', '.join(PACKAGES)}")
    for name in frameworks:
        if version_of(PACKAGES[name]) is None:
            raise ConfigError(
                f"the {name} demo needs {PACKAGES[name]!r}: pip install 'graftlm[bench]', "
                "or leave it out with --frameworks"
            )
    return [
        compare(PIPELINES / f"{name}.py", ENGINES, model, minutes=MINUTES, progress=progress) for name in frameworks
    ]


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Return notes that explain the table."""
    told = [
        "hf: what a user has today, the framework on plain transformers; graftlm: the constructor line changed.",
        "ratio: median over interleaved rounds of the wall time of hf over this one's, with its 95 % interval.",
        "equal: the answer is the one that hf gave. Each engine runs in a process of its own.",
    ]
    if any(c.name == "guidance" for c in comparisons):
        told.append(
            "guidance: its own Transformers class fails on current transformers, one call of it (crop) is mended here; "
            "that class keeps the KV of the last program, hence its hit rate."
        )
    return told
