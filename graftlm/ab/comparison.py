"""Comparison: what every engine answered, how long it took and what it computed, round by round."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from graftlm.ab.meter import Work
from graftlm.ab.profile import Divergence, Profile
from graftlm.ab.statistics import Ratio, ratio
from graftlm.core.errors import ConfigError
from graftlm.core.grammar.schema.algebra.values import same_value

MIN_PAIRS = 3
"""Rounds of two engines that a ratio is taken of, before any is left out."""
MAX_SPINNING = 0.25
"""There is no ratio where several threads of an engine lacked a core for a larger share of its time."""
CROWDED = 0.1
"""The share of its time in which an engine's threads may lack a core without a word about it."""
RESOLVED_S = 0.25
"""Rounds shorter than this are not judged alone: processor time is counted in hundredths of a second on every core."""
MAX_LOST = 0.9
MIN_OUTSIDE_S = 0.1
"""Seconds without a model call that are worth a word, where they are most of a round."""
SPOILT = (
    "There is no ratio: threads that wait for each other take many times as long then, of one engine more than of the "
    "other. End those programs, or give --threads 1."
)


@dataclass(frozen=True)
class Round:
    """One measured run of the pipeline over all inputs.

    answers     as JSON values, one per input
    right       whether each answer is right; None where the pipeline cannot tell
    spans       start and end of each model call, in seconds from the start of the round
    peak_bytes  the engine process's peak memory so far: host, and GPU where it uses one
    cpu_s       CPU time of the engine's process and its servers
    other_cores  cores of this machine that other processes, or other virtual machines, used on average meanwhile
    lost        share of the time in which the engine's threads had no core because of them; below 0: cores were left
    energy_j    what the GPUs used meanwhile, with what other processes did there; None where no card tells
    errors      that the pipeline or its framework kept to itself, one sentence each
    num_failed  calls of models and runtimes that ended in an error
    num_refused  requests that were answered with an error; a client may have sent them again
    caught      errors that `except` clauses of the pipeline's file caught, whatever raised them
    prompts     tells this round's prompts from those of another, whatever their order; None where none was seen
    unfinished  model calls that had not ended when `run` returned, as of threads that it leaves behind
    unread      types of objects in the answers that have no text of their own: nothing of them was compared
    """

    wall_s: float
    answers: list[Any]
    right: list[bool] | None
    work: Work
    spans: list[tuple[float, float]] = field(default_factory=list)
    peak_bytes: int = 0
    peak_gpu_bytes: int = 0
    cpu_s: float = 0.0
    other_cores: float = 0.0
    lost: float = 0.0
    energy_j: float | None = None
    errors: list[str] = field(default_factory=list)
    num_failed: int = 0
    num_refused: int = 0
    caught: list[str] = field(default_factory=list)
    prompts: int | None = None
    unfinished: int = 0
    unread: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Counted:
    """Pairs of rounds, of the baseline and of another engine, that a ratio is taken of.

    num_left_out  pairs that are not among them because other processes took the engines' cores
    threads       of each engine
    """

    pairs: list[tuple[Round, Round]]
    num_left_out: int
    threads: int = 1

    def ratio(self, by: Literal["wall_s", "cpu_s"] = "wall_s", lost: float = 0.0) -> Ratio:
        """The ratio of the pairs, of which there must be one."""
        theirs, ours = ([getattr(one, by) for one in side] for side in zip(*self.pairs, strict=True))
        return ratio(theirs, ours, lost, self.threads)

    @property
    def is_spoilt(self) -> bool:
        """Whether threads that wait for each other lacked cores, which slows a stock engine down beyond measure."""
        seconds = sum(one.wall_s for pair in self.pairs for one in pair)  # clocks are too coarse for short rounds
        return self.threads > 1 and self.lost > MAX_SPINNING and seconds > 4 * RESOLVED_S

    @property
    def lost(self) -> float:
        """The share of the time in which threads of one of the engines had no core, 0 to MAX_LOST."""
        return min(max([0.0, *(_mean(side, "lost") for side in zip(*self.pairs, strict=True))]), MAX_LOST)

    @property
    def other_cores(self) -> float:
        """Cores that other processes used on average."""
        return max(0.0, _mean([one for pair in self.pairs for one in pair], "other_cores"))


@dataclass
class EngineResult:
    """All rounds of one engine. `error` says why it has none; `left_out` maps inputs on which the pipeline raised.

    profile      a further round, looked at call by call; None if it was interrupted
    divergences  for the first differing inputs, where their answers begin to differ from the baseline's
    """

    engine: str
    rounds: list[Round] = field(default_factory=list)
    error: str | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    profile: Profile | None = None
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def answers(self) -> list[Any]:
        return self.rounds[0].answers

    @property
    def wall_s(self) -> float:
        return median(one.wall_s for one in self.rounds)

    @property
    def work(self) -> Work:
        return self.rounds[-1].work

    @property
    def cpu_s(self) -> float:
        return median(one.cpu_s for one in self.rounds)

    @property
    def best_hit_rate(self) -> float | None:
        """The hit rate that an unlimited cache in the best order would have; None if the prompts are not known."""
        if self.profile is None or self.profile.unique_tokens is None:
            return None
        total = sum(call.num_prompt for call in self.profile.calls)
        return 1 - self.profile.unique_tokens / total if total else None

    @property
    def num_idle(self) -> int:
        """Rounds in which no model call was made, although calls can be counted."""
        return sum(one.work.calls == 0 for one in self.rounds)

    @property
    def hidden(self) -> list[str]:
        """Errors that the pipeline kept to itself, of the first round that had any."""
        return next((one.errors for one in self.rounds if one.errors), [])

    @property
    def num_varying(self) -> int:
        """Inputs that this engine answered differently in different rounds."""
        return sum(
            any(not same_value(other, first) for other in others)
            for first, *others in zip(*self._all_answers, strict=True)
        )

    @property
    def _all_answers(self) -> list[list[Any]]:
        return [one.answers for one in self.rounds]


@dataclass
class Comparison:
    """Several engines on one pipeline; the first is the baseline.

    inputs       the measured inputs, as text
    notes        what a reader must know to read the figures
    interrupted  whether the run was stopped before its end
    prices       what a million prompt and completion tokens of an endpoint cost, if the user said it
    threads      compute threads of each engine
    """

    name: str
    title: str
    model: str
    inputs: list[str]
    results: list[EngineResult]
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    prices: tuple[float, float] | None = None
    threads: int = 1

    @property
    def baseline(self) -> EngineResult:
        return self.results[0]

    def result(self, engine: str) -> EngineResult:
        """The result of one engine. ConfigError, listing the engines, if it was not compared."""
        for result in self.results:
            if result.engine == engine:
                return result
        raise ConfigError(f"engine {engine!r} was not compared; compared: {', '.join(r.engine for r in self.results)}")

    def ratio(
        self, result: EngineResult, baseline: EngineResult | None = None, by: Literal["wall_s", "cpu_s"] = "wall_s"
    ) -> Ratio | None:
        """The baseline's wall time over this engine's; None if one of the two has no round, or threads lacked cores.

        baseline  another engine in place of the comparison's baseline
        by        "cpu_s": the ratio of CPU times, which lacks no time that other processes took
        """
        counted = self.counted(result, baseline)
        if not counted.pairs or counted.is_spoilt:
            return None
        return counted.ratio(by, counted.lost if by == "wall_s" else 0.0)

    def counted(self, result: EngineResult, baseline: EngineResult | None = None) -> Counted:
        """The pairs of rounds that a ratio is taken of. A round without a model call says nothing of an engine.

        Where at least three pairs are left, the first is left out, in which engines do for the first time what all
        rounds do, and then those in which other processes took more than CROWDED of an engine's time.
        """
        base = baseline or self.baseline
        pairs = list(zip(base.rounds, result.rounds, strict=False))
        if base.num_idle or result.num_idle or any(_lacks_answers(*pair) for pair in pairs):
            return Counted([], 0, self.threads)
        pairs = pairs[1:] if len(pairs) > MIN_PAIRS else pairs
        calm = [pair for pair in pairs if not _is_crowded(*pair)]
        if len(calm) < MIN_PAIRS:
            return Counted(pairs, 0, self.threads)
        return Counted(calm, len(pairs) - len(calm), self.threads)

    def load(self) -> list[str]:
        """What other processes did to the ratios; the first entry says what it was. Empty: hardly anything."""
        counted = [self.counted(result) for result in self.results[1:] if result.rounds and self.baseline.rounds]
        busiest = max(counted, key=lambda one: one.lost, default=None)
        said = []
        if busiest is not None and busiest.lost > CROWDED:
            said += [
                f"The machine was busy: other programs used {busiest.other_cores:.1f} of its {os.cpu_count()} cores, "
                f"and threads of the engines had none for {busiest.lost:.0%} of the time.",
                SPOILT if busiest.is_spoilt else
                "The ratio is one beside such a load, and its interval is wider for it; end those programs, or give "
                "fewer --threads.",
            ]  # fmt: skip
        if left_out := max((one.num_left_out for one in counted), default=0):
            said.append(
                f"{left_out} of {len(self.baseline.rounds)} rounds are part of no ratio, because other programs took "
                "the engines' cores."
            )
        return said

    def num_right(self, result: EngineResult) -> int | None:
        """Right answers; None where the pipeline cannot tell or the engine has no answers."""
        right = result.rounds[0].right if result.rounds else None
        return None if right is None else sum(right)

    def differing(self, result: EngineResult, *, normalised: bool = False) -> list[int] | None:
        """Positions in `inputs` whose answer differs from the baseline's; None if one of the two has no answers.

        normalised  ignore case and white space in texts
        """
        if not result.rounds or not self.baseline.rounds:
            return None
        same = _same_words if normalised else same_value
        pairs = enumerate(zip(self.baseline.answers, result.answers, strict=True))
        return [i for i, (a, b) in pairs if not same(a, b)]

    def num_equal(self, result: EngineResult) -> int | None:
        differing = self.differing(result)
        return None if differing is None else len(self.inputs) - len(differing)

    def differences(self) -> list[str]:
        """Every way in which the engines did not do the same work, one sentence each. Empty: the same work."""
        said: list[str] = []
        if self.interrupted:
            said.append("The run was interrupted: these are partial figures.")
        said += [f"{r.engine} failed." for r in self.results if r.error]
        measured = [result for result in self.results if result.rounds]
        said += [
            f"{r.engine} was asked nothing in {r.num_idle} of {len(r.rounds)} rounds: the pipeline remembered answers, "
            "met errors, or asked another model. There is no ratio."
            for r in measured
            if r.num_idle
        ]
        for result in measured:
            said += [
                f"{result.engine} answers {result.num_varying} of {len(self.inputs)} inputs differently each round."
            ] * bool(result.num_varying)
            said += [f"{result.engine}: {what} vary between rounds." for what in _varying_counts(result)]
        said += [
            f"{r.engine}: model calls had not ended when run() returned in {num} of {len(r.rounds)} rounds."
            for r in measured
            if (num := sum(one.unfinished > 0 for one in r.rounds))
        ]
        if unread := sorted({name for r in measured for name in r.rounds[0].unread}):
            said.append(
                f"Answers hold objects without a text, of which only the type was compared: {', '.join(unread)}."
            )
        hidden = [(r.engine, "; ".join(r.hidden).rstrip(" .")) for r in measured if r.hidden]
        said += [f"The pipeline kept errors with {engine} to itself: {text}." for engine, text in hidden]
        said += [
            f"Of {self.baseline.engine} and {r.engine}, one failed calls that the other answered. There is no ratio."
            for r in measured[1:] if any(map(_lacks_answers, self.baseline.rounds, r.rounds))
        ]  # fmt: skip
        for result in measured[1:] if self.baseline.rounds else ():
            said += self._against_baseline(result)
        said += [
            f"For {profile.outside_s / profile.wall_s:.0%} of {r.engine}'s time no model call was under way."
            for r in measured
            if (profile := r.profile) and profile.calls and MIN_OUTSIDE_S < profile.outside_s > profile.wall_s / 2
        ]
        if unknown := [result.engine for result in measured if result.work.calls is None]:
            said.append(f"Calls could not be counted: {', '.join(unknown)}. An answer from a cache would not be seen.")
        left_out = sorted({i for result in self.results for i in result.left_out})
        if left_out:
            num_inputs = len(left_out) + len(self.inputs)
            said.append(f"Left out: {len(left_out)} of {num_inputs} inputs on which the pipeline raised an error.")
        return said

    def _against_baseline(self, result: EngineResult) -> list[str]:
        said: list[str] = []
        differing = self.differing(result)
        if differing:
            said.append(f"{result.engine} answers {len(differing)} of {len(self.inputs)} inputs differently.")
        for what in ("calls", "prompt_tokens", "completion_tokens"):
            ours, theirs = getattr(result.work, what), getattr(self.baseline.work, what)
            if ours is not None and theirs is not None and ours != theirs:
                counted = what.replace("_", " ")
                said.append(f"{counted} differ: {theirs:,} with {self.baseline.engine}, {ours:,} with {result.engine}.")
        prompts = [one.profile.prompts if one.profile else None for one in (self.baseline, result)]
        if None not in prompts and prompts[0] != prompts[1] and not any("prompt tokens" in one for one in said):
            said.append(f"prompts differ between {self.baseline.engine} and {result.engine}.")
        both = (self.baseline, result)
        caught = [one.rounds[-1].caught for one in both]
        if len(caught[0]) != len(caught[1]):
            first = next(filter(None, caught))[0].rstrip(" .")
            nums = ", ".join(f"{len(errors)} with {one.engine}" for errors, one in zip(caught, both, strict=True))
            said.append(f"errors that the pipeline caught differ: {nums}, the first {first}.")
        return said


def _lacks_answers(one: Round, other: Round) -> bool:
    """Whether one engine failed calls that the other answered: an error takes less time than an answer."""
    refused = one.num_refused + other.num_refused > 0 and one.work.calls != other.work.calls
    return refused or one.num_failed != other.num_failed


def _is_crowded(*pair: Round) -> bool:
    return any(one.lost > CROWDED and one.wall_s >= RESOLVED_S for one in pair)


def _mean(rounds: Sequence[Round], what: Literal["lost", "other_cores"]) -> float:
    """The mean over the time of all rounds, since clocks are too coarse for short ones."""
    total: float = sum(getattr(one, what) * one.wall_s for one in rounds)
    return total / sum(one.wall_s for one in rounds)


def _varying_counts(result: EngineResult) -> list[str]:
    said = [
        what.replace("_", " ")
        for what in ("calls", "prompt_tokens")
        if len({getattr(one.work, what) for one in result.rounds}) > 1
    ]
    return said or ["prompts"] * (len({one.prompts for one in result.rounds}) > 1)


def _same_words(a: Any, b: Any) -> bool:
    return words(a) == words(b)


def words(answer: Any) -> Sequence[str]:
    """The words of an answer, without regard to case."""
    return str(answer).casefold().split()
