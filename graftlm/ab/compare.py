"""Run one pipeline on several engines, one after another, and compare what they answer and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graftlm.ab.meter import Meter, Work
from graftlm.ab.pipeline import Engine, Pipeline
from graftlm.core.errors import ConfigError
from graftlm.progress import Progress


@dataclass(frozen=True)
class EngineRun:
    """How one engine fared. `error` says why there are no answers; the counts are then those until it failed."""

    engine: str
    answers: list[Any] = field(default_factory=list)
    wall_s: float = 0.0
    work: Work = Work()
    error: str | None = None


@dataclass(frozen=True)
class Comparison:
    """All engines on one pipeline; the first is the baseline."""

    pipeline: Pipeline
    model: str
    runs: list[EngineRun]

    @property
    def baseline(self) -> EngineRun:
        return self.runs[0]

    @property
    def num_inputs(self) -> int:
        return len(self.pipeline.inputs)

    def num_right(self, run: EngineRun) -> int | None:
        """How many answers are right; None where the pipeline cannot tell or the engine failed."""
        right = self.pipeline.right
        if right is None or run.error is not None:
            return None
        return sum(bool(right(given, answer)) for given, answer in zip(self.pipeline.inputs, run.answers, strict=True))

    def num_equal(self, run: EngineRun) -> int | None:
        """How many answers equal the baseline's; None if one of the two failed."""
        if run.error is not None or self.baseline.error is not None:
            return None
        return sum(bool(a == b) for a, b in zip(self.baseline.answers, run.answers, strict=True))

    def speedup(self, run: EngineRun) -> float | None:
        """The baseline's wall time over this run's; None if one of the two failed."""
        if run.error is not None or self.baseline.error is not None:
            return None
        return self.baseline.wall_s / run.wall_s


def compare(pipeline: Pipeline, engines: Sequence[str], model: str, progress: Progress | None = None) -> Comparison:
    """Run `pipeline` on each of `engines`; one that fails is recorded and the others still run.

    An engine's constructor gets the folder or the Hugging Face id that `model` stands for. Each engine answers the
    first input once before the clock starts, so that weights and packages are loaded; what GraftLM cached of it is
    cleared.

    Raises: ConfigError for no engine, one given twice, one that the pipeline does not define, or a pipeline that
    gives not one answer per input.
    """
    from graftlm.core.model.load import resolve

    if not engines or len(set(engines)) != len(engines):
        raise ConfigError(f"engines are {list(engines)}; name at least one, each once")
    opened = [pipeline.engine(label) for label in engines]
    source = resolve(model)
    progress = progress or Progress(quiet=True)
    return Comparison(pipeline, model, [_run(pipeline, engine, source, progress) for engine in opened])


def _run(pipeline: Pipeline, engine: Engine, model: str, progress: Progress) -> EngineRun:
    meter = Meter()
    with progress.watch(pipeline.name, engine.label, lambda: meter.work().calls) as say:
        try:
            llm = engine.open(model)
            _answers(pipeline, llm, pipeline.inputs[:1])
            meter.attach()
            say("running")
            started = time.perf_counter()
            answers = _answers(pipeline, llm, pipeline.inputs)
            return EngineRun(engine.label, answers, time.perf_counter() - started, meter.work())
        except ConfigError:
            raise
        except Exception as error:  # an engine that fails is a result of the comparison
            return EngineRun(engine.label, error=f"{type(error).__name__}: {error}")
        finally:
            meter.close()


def _answers(pipeline: Pipeline, llm: Any, inputs: Sequence[Any]) -> list[Any]:
    answers = list(pipeline.run(llm, inputs))
    if len(answers) != len(inputs):
        raise ConfigError(f"run() of pipeline {pipeline.name!r} gave {len(answers)} answers to {len(inputs)} inputs")
    return answers
