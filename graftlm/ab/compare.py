"""Compare engines on one pipeline in interleaved rounds, each engine in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.engine_process import EngineFailed, EngineProcess
from graftlm.core.errors import ConfigError
from graftlm.machine import num_cores
from graftlm.progress import Progress

MIN_ROUNDS = 3
MAX_ROUNDS = 30
NARROW = 0.1
"""An interval whose width is at most this share of the ratio needs no further rounds."""


def compare(
    pipeline: str | Path,
    engines: Sequence[str] = ("hf", "graftlm"),
    model: str = "sprout",
    *,
    rounds: int = MIN_ROUNDS,
    minutes: float = 5.0,
    threads: int | None = None,
    progress: Progress | None = None,
    plants: Sequence[str | None] = (),
) -> Comparison:
    """Run a pipeline on each engine in turns (A B A B ...) and compare answers, wall time and work.

    pipeline  a Python file, see `graftlm.ab.pipeline.Pipeline`
    engines   names of engines; the first is the baseline
    rounds    at least so many rounds. Further ones follow until every interval is narrower than a tenth of its ratio.
    minutes   begin no further round after so many minutes of measuring
    threads   compute threads of every engine; None: one per core
    plants    a fault to plant per engine, as `graftlm ab --check` does

    Every engine warms up before the first round, on inputs that are not measured. Response caches of the frameworks
    are off. An engine that fails is recorded and the others go on. An input on which the pipeline raises with any
    engine is left out for all. Ctrl-C ends the comparison with the rounds that were complete.

    Raises: ConfigError for a mistake in the arguments or in the pipeline file.
    """
    path = Path(pipeline)
    names = list(engines)
    if not names or (len(set(names)) != len(names) and not plants):
        raise ConfigError(f"engines are {names}; name at least one, each once")
    if rounds < 1 or minutes <= 0:
        raise ConfigError(f"rounds is {rounds} and minutes is {minutes:g}; rounds must be at least 1, minutes above 0")
    if not path.is_file():
        raise ConfigError(f"pipeline {str(path)!r} cannot be read; give the path of a Python file")
    faults = list(plants) or [None] * len(names)
    with ExitStack() as stack:
        processes: list[EngineProcess] = []
        for name, fault in zip(names, faults, strict=True):
            process = EngineProcess(path, name, model, threads or num_cores(), fault)
            stack.callback(process.close)
            processes.append(process)
        return _Run(processes, model, rounds, minutes, progress or Progress(quiet=True)).run()


class _Run:
    """The course of one comparison."""

    def __init__(
        self, processes: list[EngineProcess], model: str, rounds: int, minutes: float, progress: Progress
    ) -> None:
        self._processes = processes
        self._rounds = rounds
        self._minutes = minutes
        self._progress = progress
        self._results = {id(process): EngineResult(process.label) for process in processes}
        self._comparison = Comparison("", "", model, [], list(self._results.values()))
        self._inputs: list[str] = []

    def run(self) -> Comparison:
        comparison = self._comparison
        try:
            self._load()
            for process in self._processes:
                self._attempt(process, "loading", partial(process.ask, "open"))
            self._find_failing_inputs()
            self._measure()
        except KeyboardInterrupt:
            comparison.interrupted = True
        left_out = {i for result in comparison.results for i in result.left_out}
        comparison.inputs = [text for i, text in enumerate(self._inputs) if i not in left_out]
        return comparison

    @property
    def _working(self) -> list[EngineProcess]:
        return [process for process in self._processes if self._results[id(process)].error is None]

    def _load(self) -> None:
        for process in self._processes:
            try:
                found = process.load()
            except EngineFailed as error:
                raise ConfigError(f"the pipeline file cannot be imported: {error}") from error
            self._comparison.name, self._comparison.title = found["name"], found["title"]
            self._inputs = found["inputs"]
        if not found["held_out"]:
            self._comparison.notes.append("The warm-up ran on a measured input, because there is only one.")

    def _attempt(self, process: EngineProcess, doing: str, step: Callable[[Callable[[int], None]], Any]) -> Any:
        """Take one step of an engine; if it fails, the engine has failed."""
        with self._progress.watch(self._comparison.name, process.label, doing) as on_calls:
            try:
                return step(on_calls)
            except EngineFailed as error:
                result = self._results[id(process)]
                result.error, result.rounds = str(error), []
                return None

    def _find_failing_inputs(self) -> None:
        """Measure one round each. Where it raises, find the inputs that raise alone and leave them out for all."""
        repeat = True
        while repeat:
            repeat = False
            for process in self._working:
                result = self._results[id(process)]
                try:
                    with self._progress.watch(self._comparison.name, process.label, "round 1") as on_calls:
                        result.rounds = [process.round(on_calls)]
                except EngineFailed as error:
                    failed = self._attempt(process, "finding inputs that raise", partial(process.ask, "probe")) or {}
                    if not failed or len(failed) == len(self._inputs):
                        result.error, result.rounds = result.error or str(error), []
                        continue
                    result.left_out = {int(i): text for i, text in failed.items()}
                    for each in self._working:
                        each.ask("leave_out", inputs=[int(i) for i in failed])
                    repeat = True
                    break

    def _measure(self) -> None:
        """Further rounds, in turns, until the intervals are narrow or the time is over."""
        deadline = time.monotonic() + 60 * self._minutes
        for number in range(2, MAX_ROUNDS + 1):
            if not self._working or time.monotonic() > deadline or (number > self._rounds and self._is_narrow()):
                break
            for process in self._working:
                measured = self._attempt(process, f"round {number}", process.round)
                if measured is not None:
                    self._results[id(process)].rounds.append(measured)
        if self._working and (done := self._num_rounds()) < self._rounds:
            self._comparison.notes.append(
                f"{done} of {self._rounds} rounds fitted into {self._minutes:g} minutes; raise --minutes for more."
            )

    def _num_rounds(self) -> int:
        return min(len(self._results[id(process)].rounds) for process in self._working)

    def _is_narrow(self) -> bool:
        others = self._comparison.results[1:]
        return all(found is None or found.width <= NARROW for found in map(self._comparison.ratio, others))
