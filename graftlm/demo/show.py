"""The demo: a stock pipeline of each framework, on plain transformers and on GraftLM."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from graftlm.ab.compare import Comparison, compare
from graftlm.ab.pipeline import Pipeline
from graftlm.core.errors import ConfigError
from graftlm.progress import Progress

PIPELINES = Path(__file__).parent / "pipelines"
ENGINES = ("hf", "graftlm")


def run(model: str, frameworks: Sequence[str], progress: Progress) -> list[Comparison]:
    """Compare each framework's pipeline on both engines.

    Raises: ConfigError for a framework without a pipeline, or one that is not installed.
    """
    known = sorted(path.stem for path in PIPELINES.glob("*.py"))
    if unknown := [name for name in frameworks if name not in known]:
        raise ConfigError(f"no demo for {unknown[0]!r}; there is one for each of: {', '.join(known)}")
    _quiet()
    return [compare(load(name), ENGINES, model, progress) for name in frameworks]


def _quiet() -> None:
    """Leave the terminal to the progress bars: no loading bars, logs and warnings of the packages underneath."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")


def load(framework: str) -> Pipeline:
    """The pipeline of one framework. ConfigError, saying what to install, if the framework is missing."""
    try:
        return Pipeline.load(PIPELINES / f"{framework}.py")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the {framework} demo needs {error.name!r}: pip install 'graftlm[bench]', "
            f"or leave it out with --frameworks"
        ) from error


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What the reader of the table must know."""
    told = [
        "hf: what a user has today, the framework on plain transformers; graftlm: the constructor line changed.",
        "ratio: wall time of hf over this one's; equal: the answer is the one that hf gave.",
    ]
    if any(c.pipeline.name == "guidance" for c in comparisons):
        told.append(
            "guidance: its own Transformers class fails on current transformers, one call of it (crop) is mended here; "
            "that class keeps the KV of the last program, hence its hit rate."
        )
    return told
