"""Compare engines on one pipeline in interleaved rounds, each engine in a process of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.engine_process import EngineFailed, EngineProcess
from graftlm.ab.other_python import checked
from graftlm.ab.profile import Call, Divergence, Profile, first_difference
from graftlm.core.errors import ConfigError
from graftlm.machine import idle_cores, num_cores
from graftlm.progress import Progress

MIN_ROUNDS = 3
MAX_ROUNDS = 30
MINUTES = 5.0
"""So long rounds begin where no number of minutes is given: those that a ratio needs."""
NARROWING_MINUTES = 1.0
"""So long those begin that only make an interval narrower."""
MAX_EXPLAINED = 5
"""Differing answers of each engine whose first differing token is looked for."""
MAX_SHOWN = 80
"""Characters of an input that raised."""
NARROW = 0.22
"""An interval whose width is at most this share of the ratio needs no further rounds: a fifth is between runs."""
BUSY = (
    "Every engine had {} thread{}, because other programs used some of the {} cores when the comparison began; "
    "--threads sets another number."
)
"""Threads that wait for each other take many times as long where one of them has no core."""


def compare(
    pipeline: str | Path,
    engines: Sequence[str] = ("hf", "graftlm"),
    model: str = "sprout",
    *,
    rounds: int = MIN_ROUNDS,
    minutes: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    plants: Sequence[str | None] = (),
    framework: str | None = None,
    swap: str | None = None,
    one_at_a_time: bool = False,
    pythons: Mapping[str, str | Path] | None = None,
) -> Comparison:
    """Run a pipeline on each engine in turns (A B B A A B ...) and compare answers, wall time and work.

    pipeline  a Python file, see `graftlm.ab.pipeline.Pipeline`
    engines   names of engines; the first is the baseline
    rounds    at least so many rounds after a first one. Further ones follow until every interval is narrow.
    minutes   begin no further round after so many minutes of measuring; None: 5, and 1 for rounds beyond `rounds`
    threads   compute threads of every engine; None: one per core that other programs leave idle at the start
    plants    a fault to plant per engine, as `graftlm ab --check` does
    framework  which framework's `run_<framework>` of the file to take, where it has several
    swap      the pipeline is a script; its calls of this constructor, such as "ChatOpenAI", give the engine
    one_at_a_time  load an engine when those before it have ended: for models that do not fit into memory together.
              Rounds are not interleaved then, so a change of the machine's load counts for one engine alone.
    pythons   the Python of an engine whose packages live in another environment, by the engine's name. That needs the
              framework and its client, pluggy, psutil and rich; this GraftLM is lent to it.

    Every engine warms up before the first round, on inputs that are not measured. Response caches of the frameworks
    are off. An engine that fails is recorded and the others go on. An input on which the pipeline raises with any
    engine is left out for all. Ctrl-C ends the comparison with the rounds that were complete.

    Raises: ConfigError for a mistake in the arguments or in the pipeline file.
    """
    path = Path(pipeline)
    names = list(engines)
    if not names or (len(set(names)) != len(names) and not plants):
        raise ConfigError(f"engines are {names}; name at least one, each once")
    if rounds < 1 or (minutes is not None and minutes <= 0):
        given = MINUTES if minutes is None else minutes
        raise ConfigError(f"rounds is {rounds} and minutes is {given:g}; rounds must be at least 1, minutes above 0")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; it must be at least 1, or left out for one per idle core")
    if not path.is_file():
        raise ConfigError(f"pipeline {str(path)!r} cannot be read; give the path of a Python file")
    others = checked(pythons or {}, names)
    faults = list(plants) or [None] * len(names)
    options = {"framework": framework, "swap": swap}
    each = threads or idle_cores()
    with ExitStack() as stack:
        processes: list[EngineProcess] = []
        for name, fault in zip(names, faults, strict=True):
            process = EngineProcess(path, name, model, each, fault, others.get(name), **options)
            stack.callback(process.close)
            processes.append(process)
        run = _Run(processes, model, rounds, minutes, progress or Progress(quiet=True), each)
        if threads is None and each < num_cores():
            run.note([BUSY.format(each, "" if each == 1 else "s", num_cores())])
        run.note([f"{name} ran in another environment: {python}." for name, python in others.items()])
        return run.one_at_a_time() if one_at_a_time else run.run()


class _Run:
    """The course of one comparison."""

    def __init__(
        self,
        processes: list[EngineProcess],
        model: str,
        rounds: int,
        minutes: float | None,
        progress: Progress,
        threads: int,
    ) -> None:
        self._processes = processes
        self._rounds = rounds
        self._minutes = MINUTES if minutes is None else minutes
        self._narrowing_minutes = NARROWING_MINUTES if minutes is None else minutes
        self._progress = progress
        self._results = {id(process): EngineResult(process.label) for process in processes}
        self._comparison = Comparison("", "", model, [], list(self._results.values()), threads=threads)
        self._inputs: list[str] = []
        self._interleaved = True

    def note(self, notes: Sequence[str]) -> None:
        self._comparison.notes += notes

    def run(self) -> Comparison:
        comparison = self._comparison
        try:
            self._load()
            for process in self._processes:
                self._open(process)
            self._find_failing_inputs()
            self._measure()
            self._inspect()
            self._explain()
        except KeyboardInterrupt:
            comparison.interrupted = True
        return self._finished()

    def one_at_a_time(self) -> Comparison:
        """The same with one engine in memory at a time. An input that raises with a later engine is not left out."""
        comparison, processes = self._comparison, self._processes
        comparison.notes.append("Engines ran one after the other: rounds were not interleaved.")
        self._minutes /= len(processes)
        self._interleaved = False
        try:
            self._load()
            for process in processes:
                self._processes = [process]
                self._open(process)
                self._find_failing_inputs()
                self._measure()
                self._inspect()
                process.close()
        except KeyboardInterrupt:
            comparison.interrupted = True
        self._processes = processes
        return self._finished()

    def _finished(self) -> Comparison:
        comparison = self._comparison
        left_out = {i for result in comparison.results for i in result.left_out}
        comparison.inputs = [text for i, text in enumerate(self._inputs) if i not in left_out]
        comparison.notes += comparison.load()
        return comparison

    @property
    def _working(self) -> list[EngineProcess]:
        return [process for process in self._processes if self._results[id(process)].error is None]

    def _load(self) -> None:
        for process in self._processes:
            try:
                found = process.load()
            except EngineFailed as error:
                where = "" if process.python == sys.executable else f" for {process.label} by {process.python}"
                raise ConfigError(f"the pipeline file cannot be imported{where}: {error}") from error
            self._comparison.name, self._comparison.title = found["name"], found["title"]
            if self._inputs and found["inputs"] != self._inputs:
                raise ConfigError(
                    f"inputs() of pipeline {found['name']!r} gives other inputs in each process; let it give the same "
                    "ones each time, as with random.Random(0)"
                )
            self._inputs = found["inputs"]
            self._comparison.notes += [note for note in found["notes"] if note not in self._comparison.notes]
        if not found["held_out"]:
            self._comparison.notes.append("The warm-up ran on a measured input, because there is only one.")

    def _open(self, process: EngineProcess) -> None:
        notes = self._attempt(process, "loading", partial(process.ask, "open"))
        self._comparison.notes += notes or []

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
                    result.left_out = {int(i): f"{text} ({self._shown(int(i))})" for i, text in failed.items()}
                    for each in self._working:
                        each.ask("leave_out", inputs=[int(i) for i in failed])
                    repeat = True
                    break

    def _shown(self, index: int) -> str:
        """The beginning of an input: its number says little where another one was held out for the warm-up."""
        text = " ".join(self._inputs[index].split())
        return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")

    def _measure(self) -> None:
        """Further rounds, in turns, until the intervals are narrow or the time is over."""
        started = time.monotonic()
        least = self._rounds + 1  # the first is part of no ratio, see `Comparison.counted`
        for number in range(2, (MAX_ROUNDS if self._interleaved else least) + 1):
            minutes = self._minutes if number <= least else min(self._minutes, self._narrowing_minutes)
            is_over = time.monotonic() - started > 60 * minutes
            if not self._working or is_over or (number > least and self._is_narrow()):
                break
            for process in self._working[:: 1 if number % 2 else -1]:  # a steady drift weighs on both alike
                measured = self._attempt(process, f"round {number}", process.round)
                if measured is not None:
                    self._results[id(process)].rounds.append(measured)
        if self._working and (done := self._num_rounds()) < self._rounds:
            self._comparison.notes.append(
                f"{done} of {self._rounds} rounds fitted into {self._minutes:g} minutes; raise --minutes for more."
            )

    def _inspect(self) -> None:
        """One more round of each engine, call by call. An engine that fails in it keeps its rounds."""
        for process in self._working:
            with suppress(EngineFailed), self._progress.watch(self._comparison.name, process.label, "looking closer"):
                self._results[id(process)].profile = Profile.of_json(process.ask("inspect"))

    def _explain(self) -> None:
        """For some answers that differ, find the first token that does, and what both engines think of it."""
        base, *others = self._processes
        for process in others:
            result = self._results[id(process)]
            for i in (self._comparison.differing(result) or [])[:MAX_EXPLAINED]:
                with suppress(EngineFailed):
                    found = _divergence(i, base, process)
                    result.divergences += [found] if found is not None else []

    def _num_rounds(self) -> int:
        return min(len(self._results[id(process)].rounds) for process in self._working)

    def _is_narrow(self) -> bool:
        """Whether more rounds would hardly make an interval narrower; load, which they cannot mend, is left aside."""
        counted = map(self._comparison.counted, self._comparison.results[1:])
        return all(not one.pairs or one.ratio().width <= NARROW for one in counted)


def _divergence(index: int, base: EngineProcess, other: EngineProcess) -> Divergence | None:
    """Run one input alone on both engines; None where no call has the same prompt and other tokens."""
    ours, theirs = ([Call(**call) for call in process.ask("trace", index=index)] for process in (base, other))
    place = first_difference(ours, theirs)
    if place is None:
        return None
    number, position = place
    call = ours[number]
    other_ids = next(t.token_ids for t in theirs if t.prompt_ids == call.prompt_ids and t.token_ids != call.token_ids)
    if position >= min(len(call.token_ids), len(other_ids)):
        return None  # one ends where the other goes on
    tokens = [call.token_ids[position], other_ids[position]]
    ids = call.prompt_ids + call.token_ids[:position]
    found = {process.label: process.ask("logprobs", ids=ids, tokens=tokens) for process in (base, other)}
    spelled = next((one for one in found.values() if one["texts"]), {"texts": list(map(str, tokens)), "before": ""})
    logprobs = {label: (one["logprobs"][0], one["logprobs"][1]) for label, one in found.items() if one["logprobs"]}
    return Divergence(
        index, number, position, str(spelled["before"]), (spelled["texts"][0], spelled["texts"][1]), logprobs
    )
