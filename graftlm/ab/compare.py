"""Compare engines on one pipeline in interleaved rounds, each engine in a process of its own."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypedDict, Unpack, get_args

from graftlm.ab.comparison import Comparison, EngineResult
from graftlm.ab.engines.other_python import checked
from graftlm.ab.measure.engine_process import EngineFailed, EngineProcess
from graftlm.ab.measure.profile import Divergence, Plant, first_difference
from graftlm.core.errors import ConfigError
from graftlm.machine import idle_cores, num_cores, processor
from graftlm.progress import Progress

MIN_ROUNDS = 3
MAX_ROUNDS = 30
MINUTES = 5.0
"""Minutes of the rounds that a ratio needs, by default; later rounds do not begin."""
NARROWING_MINUTES = 1.0
"""Minutes of the further rounds that narrow an interval."""
MAX_TRACES = 3
"""Limit of the traced rounds of an engine."""
MAX_PROLONGED = 1.5
"""Time of a traced round, relative to the median of the measured ones, above which another one is traced."""
MAX_TRACE_S = 5.0
"""Time of a traced round above which no other one is traced."""
MAX_EXPLAINED = 5
"""Limit of the differing answers of each engine whose first differing token is searched."""
MAX_SHOWN = 80
"""Limit of the characters of a raising input in a message."""
NARROW = 0.22
"""Width of an interval, relative to its ratio, that needs no further rounds: a fifth of it is between runs."""
BUSY = (
    "Every engine had {} thread{}, because other programs used some of the {} cores when the comparison began; "
    "--threads sets another number."
)
"""Message for engines of several threads that lack a core: busy-waiting makes them many times slower."""


class Setup(TypedDict, total=False):
    """Further options of a comparison.

    framework      the framework whose `run_<framework>` of the file runs; required if it has several
    swap           the pipeline is a script; its calls of this constructor, such as "ChatOpenAI", give the engine
    one_at_a_time  load one engine at a time, for models that do not fit into memory together. Rounds are not
                   interleaved then, so a change of the machine's load counts for one engine alone.
    pythons        by engine, the Python whose environment has its packages. That needs the framework and its client,
                   pluggy, psutil and rich; this GraftLM is lent to it.
    plants         the fault to plant per engine, as `graftlm ab --check` does
    narrows        False: no round beyond `rounds`, however wide an interval is
    is_watched     False leaves out the further round that is traced call by call, and the figures that need it
    dtype          the dtype of the weights, "float32" for answers that do not depend on the batch; None: the model's
    """

    framework: str | None
    swap: str | None
    one_at_a_time: bool
    pythons: Mapping[str, str | Path] | None
    plants: Sequence[str | None]
    narrows: bool
    is_watched: bool
    dtype: str | None


def compare(
    pipeline: str | Path,
    engines: Sequence[str] = ("hf", "graftlm"),
    model: str = "sprout",
    *,
    rounds: int = MIN_ROUNDS,
    minutes: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    **setup: Unpack[Setup],
) -> Comparison:
    """Run a pipeline on each engine in turns (A B B A A B ...) and compare answers, wall time and work.

    pipeline  a Python file, see `graftlm.ab.pipeline.Pipeline`
    engines   names of engines; the first is the baseline
    rounds    least number of rounds after a first one. Further ones follow until every interval is narrow.
    minutes   minutes of measuring, from the first round on, after which no round begins, and no input in the search
              for inputs that raise; None: 5, and 1 for rounds beyond `rounds`
    threads   compute threads of every engine; None: one per core that other programs leave idle at the start

    Every engine warms up before the first round, on inputs that are not measured. Response caches of the frameworks
    are off. An engine that fails is recorded and the others run on. An input on which the pipeline raises with any
    engine is left out for all. Ctrl-C ends the comparison with the rounds that were complete.

    Raises: ConfigError for a mistake in the arguments or in the pipeline file.
    """
    path, names = Path(pipeline), list(engines)
    faults = list(setup.get("plants", ())) or [None] * len(names)
    if not names or (len(set(names)) != len(names) and not any(faults)):
        raise ConfigError(f"engines are {names}; name at least one, each once")
    if rounds < 1 or (minutes is not None and minutes <= 0):
        given = MINUTES if minutes is None else minutes
        raise ConfigError(f"rounds is {rounds} and minutes is {given:g}; rounds must be at least 1, minutes above 0")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; it must be at least 1, or left out for one per idle core")
    if not path.is_file():
        raise ConfigError(f"pipeline {str(path)!r} cannot be read; give the path of a Python file")
    pythons = checked(setup.get("pythons") or {}, names)
    options = {"framework": setup.get("framework"), "swap": setup.get("swap"), "dtype": setup.get("dtype")}
    each = threads or idle_cores()
    with ExitStack() as stack:
        processes: list[EngineProcess] = []
        for name, fault in zip(names, faults, strict=True):
            process = EngineProcess(path, name, model, each, fault, pythons.get(name), **options)
            stack.callback(process.close)
            processes.append(process)
        date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z")
        machine = f"{processor()}, {num_cores()} cores"
        progress = progress or Progress(quiet=True)
        run = _Run(
            processes,
            Comparison("", "", model, [], [], threads=each, date=date, machine=machine),
            rounds,
            minutes,
            progress,
        )
        if threads is None and each < num_cores():
            run.comparison.notes.append(BUSY.format(each, "" if each == 1 else "s", num_cores()))
        run.comparison.notes += [f"{name} ran in another environment: {python}." for name, python in pythons.items()]
        run.is_watched, run.narrows = setup.get("is_watched", True), setup.get("narrows", True)
        return run.one_at_a_time() if setup.get("one_at_a_time") else run.run()


class _Run:
    """The course of one comparison."""

    def __init__(
        self,
        processes: list[EngineProcess],
        comparison: Comparison,
        rounds: int,
        minutes: float | None,
        progress: Progress,
    ) -> None:
        self.comparison = comparison
        self._processes = processes
        self._rounds = rounds
        self._minutes = MINUTES if minutes is None else minutes
        self._narrowing_minutes = NARROWING_MINUTES if minutes is None else minutes
        self._progress = progress
        self.is_watched, self.narrows = True, True
        self._results = {id(process): EngineResult(process.label) for process in processes}
        comparison.results += self._results.values()
        self._inputs: list[str] = []
        self._interleaved = True
        self._ends = 0.0  # the time after which no round begins

    def run(self) -> Comparison:
        comparison = self.comparison
        try:
            self._load()
            self._measure_processes(self._processes)
            self._explain()
        except KeyboardInterrupt:
            comparison.interrupted = True
        return self._finished()

    def one_at_a_time(self) -> Comparison:
        """Run with one engine in memory at a time. An input that raises with a later engine is not left out."""
        self.comparison.notes.append("Engines ran one after the other: rounds were not interleaved.")
        self._minutes /= len(self._processes)
        self._interleaved = False
        try:
            self._load()
            for process in self._processes:
                self._measure_processes([process])
                process.close()
        except KeyboardInterrupt:
            self.comparison.interrupted = True
        return self._finished()

    def _measure_processes(self, processes: Sequence[EngineProcess]) -> None:
        for process in processes:  # not at the same time: compute threads that wait for each other take all cores
            notes = self._attempt(process, "loading", partial(process.ask, "open"))
            self.comparison.notes += notes or []
            if notes is not None:
                self._results[id(process)].facts = process.ask("facts")
        self._ends = time.monotonic() + 60 * self._minutes
        self._find_failing_inputs(processes)
        self._measure(processes)
        for process in self._working(processes) if self.is_watched else ():
            self._trace(process)

    def _trace(self, process: EngineProcess) -> None:
        """Keep a round that is traced call by call. An error in it costs no round.

        A short round that other programs prolong is repeated: its parts would contradict the measured times.
        """
        result = self._results[id(process)]
        usual_s = median(one.wall_s for one in result.rounds) if result.rounds else math.inf
        for _ in range(MAX_TRACES):
            watched = self._progress.watch(self.comparison.name, process.label, "tracing calls")
            with suppress(EngineFailed), watched as on_calls:
                found = process.ask("inspect", on_calls)
                if result.profile is None or found.wall_s < result.profile.wall_s:
                    result.profile = found
                if MAX_PROLONGED * usual_s < found.wall_s <= MAX_TRACE_S:
                    continue
            return

    def _finished(self) -> Comparison:
        comparison = self.comparison
        left_out = {i for result in comparison.results for i in (*result.left_out, *result.untried)}
        comparison.inputs = [text for i, text in enumerate(self._inputs) if i not in left_out]
        comparison.notes += comparison.load()
        return comparison

    def _working(self, processes: Sequence[EngineProcess]) -> list[EngineProcess]:
        return [process for process in processes if self._results[id(process)].error is None]

    def _load(self) -> None:
        comparison = self.comparison
        for process in self._processes:
            try:
                found = process.receive()
            except EngineFailed as error:
                where = "" if process.python == sys.executable else f" for {process.label} by {process.python}"
                raise ConfigError(f"the pipeline file cannot be imported{where}: {error}") from error
            comparison.name, comparison.title = found["name"], found["title"]
            if self._inputs and found["inputs"] != self._inputs:
                raise ConfigError(
                    f"inputs() of pipeline {found['name']!r} gives other inputs in each process; let it give the same "
                    "ones each time, as with random.Random(0)"
                )
            self._inputs = found["inputs"]
            comparison.notes += [note for note in found["notes"] if note not in comparison.notes]
        if not found["held_out"]:
            comparison.notes.append("The warm-up ran on a measured input, because there is only one.")

    def _attempt(self, process: EngineProcess, doing: str, step: Callable[[Callable[[int], None]], Any]) -> Any:
        """Take one step of an engine; if it fails, the engine has failed."""
        with self._progress.watch(self.comparison.name, process.label, doing) as on_calls:
            try:
                return step(on_calls)
            except EngineFailed as error:
                result = self._results[id(process)]
                result.error, result.rounds = str(error), []
                return None

    def _find_failing_inputs(self, processes: Sequence[EngineProcess]) -> None:
        """Measure one round of each engine. Where it raises, leave the inputs that raise alone out for all engines."""
        repeat = True
        while repeat:
            repeat = False
            for process in self._working(processes):
                result = self._results[id(process)]
                try:
                    with self._progress.watch(self.comparison.name, process.label, "round 1") as on_calls:
                        result.rounds = [process.ask("round", on_calls)]
                except EngineFailed as error:
                    left_out = self._search(process, str(error))
                    for each in self._working(processes) if left_out else ():
                        each.ask("leave_out", inputs=left_out)
                    if left_out:
                        repeat = True
                        break

    def _search(self, process: EngineProcess, raised: str) -> list[int]:
        """Return the inputs to leave out after `raised`. Empty, with the error noted, if that cannot help."""
        result, left_s = self._results[id(process)], self._ends - time.monotonic()
        result.rounds = []
        if left_s <= 0:
            result.error = f"{raised}; no time was left to find the inputs that raise: give more --minutes"
            return []
        doing = f"finding inputs that raise, of {len(self._inputs)}"
        # Half of the time is for the rounds.
        found = self._attempt(process, doing, partial(process.ask, "probe", seconds=left_s / 2))
        failed, untried = found or ({}, [])
        if not failed and not untried or len(failed) + len(untried) >= len(self._inputs):
            result.error = result.error or raised
            return []
        result.left_out = {i: f"{text} ({self._shown(i)})" for i, text in failed.items()}
        result.untried = untried
        if untried:
            self.comparison.notes.append(
                f"{len(untried)} of {len(self._inputs)} inputs were left out: the search for inputs that raise with "
                f"{result.engine} took half of {self._minutes:g} minutes; give more --minutes, or fewer inputs."
            )
        return [*failed, *untried]

    def _shown(self, index: int) -> str:
        """Return the beginning of an input: its number differs from that in the file where one was held out."""
        text = " ".join(self._inputs[index].split())
        return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")

    def _measure(self, processes: Sequence[EngineProcess]) -> None:
        """Measure further rounds, in turns, until the intervals are narrow or the time is over."""
        narrowing_ends = min(self._ends, time.monotonic() + 60 * self._narrowing_minutes)
        least = self._rounds + 1  # the first is part of no ratio, see `Comparison.counted`
        most = MAX_ROUNDS if self._interleaved and self.narrows else least
        for number in range(2, most + 1):
            is_over = time.monotonic() > (self._ends if number <= least else narrowing_ends)
            working = self._working(processes)
            if not working or is_over or (number > least and self._is_narrow()):
                break
            for process in working[:: 1 if number % 2 else -1]:  # a steady drift then weighs on all engines alike
                measured = self._attempt(process, f"round {number}", partial(process.ask, "round"))
                if measured is not None:
                    self._results[id(process)].rounds.append(measured)
        done = [len(self._results[id(process)].rounds) for process in self._working(processes)]
        if done and min(done) < self._rounds:
            self.comparison.notes.append(
                f"{min(done)} of {self._rounds} rounds fitted into {self._minutes:g} minutes; raise --minutes for more."
            )

    def _explain(self) -> None:
        """Find the first token that differs, and its log-probabilities, for some answers that differ."""
        base, *others = self._processes
        for process in others:
            result = self._results[id(process)]
            for i in (self.comparison.differing(result) or [])[:MAX_EXPLAINED]:
                with suppress(EngineFailed):
                    found = _divergence(i, base, process)
                    result.divergences += [found] if found is not None else []

    def _is_narrow(self) -> bool:
        """Return True if more rounds would hardly narrow an interval; load, which they cannot mend, does not count."""
        counted = map(self.comparison.counted, self.comparison.results[1:])
        return all(not one.pairs or one.ratio().width <= NARROW for one in counted)


def _divergence(index: int, base: EngineProcess, other: EngineProcess) -> Divergence | None:
    """Run one input alone on both engines; None where no call has the same prompt and other tokens."""
    ours, theirs = (process.ask("trace", index=index) for process in (base, other))
    found = first_difference(ours, theirs)
    if found is None:
        return None
    number, position = found
    call = ours[number]
    other_ids = next(t.token_ids for t in theirs if t.prompt_ids == call.prompt_ids and t.token_ids != call.token_ids)
    if position >= min(len(call.token_ids), len(other_ids)):
        return None  # one answer is the beginning of the other
    tokens = [call.token_ids[position], other_ids[position]]
    ids = call.prompt_ids + call.token_ids[:position]
    scores = {process.label: process.ask("logprobs", ids=ids, tokens=tokens) for process in (base, other)}
    spelled = next((one for one in scores.values() if one["texts"]), {"texts": list(map(str, tokens)), "before": ""})
    logprobs = {label: (one["logprobs"][0], one["logprobs"][1]) for label, one in scores.items() if one["logprobs"]}
    return Divergence(
        index, number, position, str(spelled["before"]), (spelled["texts"][0], spelled["texts"][1]), logprobs
    )


# -- graftlm ab --check ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One planted fault; `evidence` is the comparison's figure for it."""

    plant: str
    found: bool
    evidence: str


def check(
    pipeline: str | Path, engine: str, model: str, *, plants: Sequence[Plant] = get_args(Plant), **options: Any
) -> list[Finding]:
    """Compare `engine` with itself, once per fault that is planted into the second of the two.

    slow            every round takes twice as long: the ratio's interval must lie below 1
    changed answer  one answer is changed: exactly that answer must differ
    cached call     one input is answered from memory: the second engine must have made fewer calls

    options  of `compare`; `minutes` are those of all faults together
    """
    given = options.pop("minutes", None)
    minutes = (MINUTES if given is None else given) / len(plants)
    findings = []
    for plant in plants:
        compared = compare(pipeline, [engine, engine], model, minutes=minutes, plants=[None, plant], **options)
        found, evidence = _sign_of(plant, compared)
        findings.append(Finding(plant, found, compared.results[1].error or evidence))
    return findings


def _sign_of(plant: Plant, compared: Comparison) -> tuple[bool, str]:
    """Return whether the comparison shows the fault, and its figure."""
    one, other = compared.results
    if plant == "slow":
        counted = compared.counted(other)
        ratio = counted.ratio() if counted.pairs else None  # load weighs on an engine and on itself alike
        return ratio is not None and ratio.high is not None and ratio.high < 1, f"ratio {ratio}"
    if plant == "changed answer":
        differing = compared.differing(other)
        return differing == [0], f"{len(differing or ())} of {len(compared.inputs)} answers differ"
    calls, fewer = (result.work.calls if result.rounds else None for result in (one, other))
    return calls is not None and fewer is not None and fewer < calls, f"{calls} calls against {fewer}"
