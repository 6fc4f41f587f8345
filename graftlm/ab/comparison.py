"""Comparison: the rounds of several engines on one pipeline, their ratios and every difference between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from graftlm.ab.measure.profile import Divergence, Profile, Round, Work
from graftlm.ab.statistics import Ratio, ratio
from graftlm.core.errors import ConfigError
from graftlm.core.grammar.schema.algebra.values import same_value

MIN_PAIRS = 3
"""Least number of rounds for which further rounds are left out of a ratio."""
MAX_SPINNING = 0.25
"""Share of the time without a core above which an engine of several threads has no ratio."""
CROWDED = 0.1
"""Share of the time without a core above which a round counts as disturbed."""
RESOLVED_S = 0.25
"""Shortest round, in seconds, that is judged alone: processor time is counted in hundredths of a second a core."""
MAX_LOST = 0.9
MIN_OUTSIDE_S = 0.1
"""Seconds without a model call that are mentioned, where they are most of a round."""
SPOILT = (
    "There is no ratio: threads that wait for each other take many times as long then, of one engine more than of the "
    "other. End those programs, or give --threads 1."
)
Clock = Literal["wall_s", "cpu_s"]


@dataclass(frozen=True)
class Counted:
    """Pairs of rounds, of the baseline and of another engine, that enter a ratio.

    num_left_out  pairs that are left out because other processes used the engines' cores
    threads       of each engine
    """

    pairs: list[tuple[Round, Round]]
    num_left_out: int
    threads: int = 1

    def ratio(self, by: Clock = "wall_s", lost: float = 0.0) -> Ratio:
        """Compute the ratio of the pairs, of which there must be one."""
        theirs, ours = ([getattr(one, by) for one in side] for side in zip(*self.pairs, strict=True))
        return ratio(theirs, ours, lost, self.threads)

    @property
    def is_spoilt(self) -> bool:
        """True if threads that wait for each other lacked cores, which slows a stock engine down without a limit."""
        seconds = sum(one.wall_s for pair in self.pairs for one in pair)  # clocks are too coarse for short rounds
        return self.threads > 1 and self.lost > MAX_SPINNING and seconds > 4 * RESOLVED_S

    @property
    def lost(self) -> float:
        """The share of the time in which threads of one of the engines had no core, 0 to MAX_LOST."""
        return min(max([0.0, *(_mean(side, "lost") for side in zip(*self.pairs, strict=True))]), MAX_LOST)

    @property
    def other_cores(self) -> float:
        """Mean number of cores that other processes used."""
        return max(0.0, _mean([one for pair in self.pairs for one in pair], "other_cores"))


@dataclass
class EngineResult:
    """All rounds of one engine.

    error        the reason why it has none
    left_out     the errors of inputs on which the pipeline raised
    untried      inputs that are left out because the search for inputs that raise had to end before them
    profile      a further, watched round; None if it was interrupted
    divergences  the first difference from the baseline's answer, for the first differing inputs
    facts        dtype and device of the weights, and the versions of packages; None where unknown
    """

    engine: str
    rounds: list[Round] = field(default_factory=list)
    error: str | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    untried: list[int] = field(default_factory=list)
    profile: Profile | None = None
    divergences: list[Divergence] = field(default_factory=list)
    facts: dict[str, str | None] = field(default_factory=dict)

    @property
    def answers(self) -> list[Any]:
        return self.rounds[0].answers

    @property
    def work(self) -> Work:
        return self.rounds[-1].work

    @property
    def best_hit_rate(self) -> float | None:
        """The hit rate of an unlimited cache in the best order; None for unknown prompts."""
        if self.profile is None or self.profile.unique_tokens is None:
            return None
        total = sum(call.num_prompt for call in self.profile.calls)
        return 1 - self.profile.unique_tokens / total if total else None

    @property
    def num_idle(self) -> int:
        """Rounds without a model call, for an engine whose calls can be counted."""
        return sum(one.work.calls == 0 for one in self.rounds)

    @property
    def hidden(self) -> list[str]:
        """Errors that the pipeline did not raise, of the first round with any."""
        return next((one.errors for one in self.rounds if one.errors), [])

    @property
    def num_varying(self) -> int:
        """Inputs with different answers in different rounds."""
        answers = zip(*(one.answers for one in self.rounds), strict=True)
        return sum(any(not same_value(other, first) for other in others) for first, *others in answers)

    def varying_counts(self) -> list[str]:
        """Return the names of counts that differ between rounds; prompts of equal lengths among them."""
        counts = [
            what.replace("_", " ") for what in ("calls", "prompt_tokens")
            if len({getattr(one.work, what) for one in self.rounds}) > 1
        ]  # fmt: skip
        return counts or ["prompts"] * (len({one.prompts for one in self.rounds}) > 1)


@dataclass
class Comparison:
    """Several engines on one pipeline; the first is the baseline.

    inputs       the measured inputs, as text
    notes        remarks without which the figures mislead
    interrupted  True if the run was stopped before its end
    prices       price of a million prompt tokens and completion tokens of an endpoint, if the user gave it
    threads      compute threads of each engine
    date         day and time of the first round, with its offset from UTC
    machine      processor and cores
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
    date: str = ""
    machine: str = ""

    def _repr_html_(self) -> str:
        """Return the result in a sentence, and the picture of the speed-ups, as notebooks show them."""
        from html import escape

        from graftlm.ab import html_page, svg

        return f"<p>{escape(html_page.summary(self))}</p>{svg.intervals(self)}"

    @property
    def baseline(self) -> EngineResult:
        return self.results[0]

    def result(self, engine: str) -> EngineResult:
        """Return the result of one engine. Raises: ConfigError, listing the engines, if it was not compared."""
        for result in self.results:
            if result.engine == engine:
                return result
        raise ConfigError(f"engine {engine!r} was not compared; compared: {', '.join(r.engine for r in self.results)}")

    def ratio(self, result: EngineResult, baseline: EngineResult | None = None, by: Clock = "wall_s") -> Ratio | None:
        """Compute the baseline's wall time over this engine's; None if one has no round, or threads lacked cores.

        baseline  another engine in place of the comparison's baseline
        by        "cpu_s": the ratio of CPU times, which does not contain the time of other processes
        """
        counted = self.counted(result, baseline)
        if not counted.pairs or counted.is_spoilt:
            return None
        return counted.ratio(by, counted.lost if by == "wall_s" else 0.0)

    def kept(self) -> list[int]:
        """Return the numbers of the rounds that enter every time and every ratio, the same for all engines.

        The first round, in which engines warm up, is left out where MIN_PAIRS others are left; then rounds in which
        other processes used more than CROWDED of an engine's time.
        """
        measured = [result.rounds for result in self.results if result.rounds]
        num = min(map(len, measured), default=0)
        rounds = list(range(1 if num > MIN_PAIRS else 0, num))
        calm = [i for i in rounds if not any(_is_crowded(each[i]) for each in measured)]
        return rounds if len(calm) < MIN_PAIRS else calm

    def median_of(self, result: EngineResult, what: Literal["wall_s", "cpu_s", "other_cores"]) -> float:
        """Compute the median over the rounds that enter the ratios; over all of an engine without such rounds."""
        rounds = [result.rounds[i] for i in self.kept()] or result.rounds
        values: list[float] = [getattr(one, what) for one in rounds]
        return median(values)

    def counted(self, result: EngineResult, baseline: EngineResult | None = None) -> Counted:
        """Return the pairs of rounds that enter a ratio. A round without a model call measures no engine."""
        base = baseline or self.baseline
        pairs = list(zip(base.rounds, result.rounds, strict=False))
        if base.num_idle or result.num_idle or any(_lacks_answers(*pair) for pair in pairs):
            return Counted([], 0, self.threads)
        kept = [pairs[i] for i in self.kept() if i < len(pairs)]
        warm = pairs[1:] if len(pairs) > MIN_PAIRS else pairs
        return Counted(kept, len(warm) - len(kept), self.threads)

    def load(self) -> list[str]:
        """Describe the effect of other processes on the ratios, their load first. Empty without an effect."""
        counted = [self.counted(result) for result in self.results[1:] if result.rounds and self.baseline.rounds]
        busiest = max(counted, key=lambda one: one.lost, default=None)
        said = []
        if busiest is not None and busiest.lost > CROWDED:
            said = [
                f"The machine was busy: other programs used {busiest.other_cores:.1f} of its {os.cpu_count()} cores, "
                f"and threads of the engines had none for {busiest.lost:.0%} of the time.",
                SPOILT if busiest.is_spoilt else
                "The ratio is one beside such a load, and its interval is wider for it; end those programs, or give "
                "fewer --threads.",
            ]  # fmt: skip
        if left_out := max((one.num_left_out for one in counted), default=0):
            said.append(
                f"{left_out} of {len(self.baseline.rounds)} rounds are part of no time and no ratio, because other "
                "programs took the engines' cores."
            )
        return said

    def num_right(self, result: EngineResult) -> int | None:
        """Count the right answers; None for a pipeline without `right`, or an engine without answers."""
        right = result.rounds[0].right if result.rounds else None
        return None if right is None else sum(right)

    def differing(self, result: EngineResult, *, normalised: bool = False) -> list[int] | None:
        """Return the indices of inputs whose answer differs from the baseline's; None if one has no answers.

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
        """Describe every way in which the engines did not do the same work, one sentence each. Empty: the same work."""
        measured = [result for result in self.results if result.rounds]
        said = ["The run was interrupted: these are partial figures."] * self.interrupted
        said += [f"{r.engine} failed." for r in self.results if r.error]
        said += [
            f"{r.engine} was asked nothing in {r.num_idle} of {len(r.rounds)} rounds: the pipeline remembered answers, "
            "met errors, or asked another model. There is no ratio."
            for r in measured
            if r.num_idle
        ]
        for r in measured:
            said += [f"{r.engine} answers {r.num_varying} of {len(self.inputs)} inputs differently each round."] * bool(
                r.num_varying
            )
            said += [f"{r.engine}: {what} vary between rounds." for what in r.varying_counts()]
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
            for r in measured[1:]
            if any(map(_lacks_answers, self.baseline.rounds, r.rounds))
        ]
        for r in measured[1:] if self.baseline.rounds else ():
            said += self._against_baseline(r)
        said += [
            f"For {profile.outside_s / profile.wall_s:.0%} of {r.engine}'s time no model call was under way."
            for r in measured
            if (profile := r.profile) and profile.calls and MIN_OUTSIDE_S < profile.outside_s > profile.wall_s / 2
        ]
        if unknown := [r.engine for r in measured if r.work.calls is None]:
            said.append(f"Calls could not be counted: {', '.join(unknown)}. An answer from a cache would not be seen.")
        if num := len({i for result in self.results for i in result.left_out}):
            total = num + len(self.inputs) + len({i for result in self.results for i in result.untried})
            said.append(f"Left out: {num} of {total} inputs on which the pipeline raised an error.")
        return said

    def _against_baseline(self, result: EngineResult) -> list[str]:
        """Describe the differences between one engine and the baseline."""
        base, said = self.baseline, []
        if differing := self.differing(result):
            said.append(f"{result.engine} answers {len(differing)} of {len(self.inputs)} inputs differently.")
        for what in ("calls", "prompt_tokens", "completion_tokens", "pictures"):
            ours, theirs = getattr(result.work, what), getattr(base.work, what)
            if ours is not None and theirs is not None and ours != theirs:
                counted = what.replace("_", " ")
                said.append(f"{counted} differ: {theirs:,} with {base.engine}, {ours:,} with {result.engine}.")
        dtypes = [one.facts.get("dtype") for one in (base, result)]
        if None not in dtypes and dtypes[0] != dtypes[1]:
            said.append(f"dtypes differ: {dtypes[0]} with {base.engine}, {dtypes[1]} with {result.engine}.")
        prompts = [one.profile.prompts if one.profile else None for one in (base, result)]
        if None not in prompts and prompts[0] != prompts[1] and not any("prompt tokens" in one for one in said):
            said.append(f"prompts differ between {base.engine} and {result.engine}.")
        caught = [one.rounds[-1].caught for one in (base, result)]
        if len(caught[0]) != len(caught[1]):
            first = next(filter(None, caught))[0].rstrip(" .")
            nums = f"{len(caught[0])} with {base.engine}, {len(caught[1])} with {result.engine}"
            said.append(f"errors that the pipeline caught differ: {nums}, the first {first}.")
        return said


def _lacks_answers(one: Round, other: Round) -> bool:
    """Return True if one engine failed calls that the other answered: an error takes less time than an answer."""
    refused = one.num_refused + other.num_refused > 0 and one.work.calls != other.work.calls
    return refused or one.num_failed != other.num_failed


def _is_crowded(one: Round) -> bool:
    return one.lost > CROWDED and one.wall_s >= RESOLVED_S


def _mean(rounds: Sequence[Round], what: Literal["lost", "other_cores"]) -> float:
    """Return the mean over the time of all rounds: clocks are too coarse for short ones."""
    total: float = sum(getattr(one, what) * one.wall_s for one in rounds)
    return total / sum(one.wall_s for one in rounds)


def _same_words(a: Any, b: Any) -> bool:
    return str(a).casefold().split() == str(b).casefold().split()


def assert_faster(comparison: Comparison, engine: str | None = None, *, by: float = 1.0) -> None:
    """Assert that `engine` (by default the last one) is at least `by` times as fast as the baseline.

    The whole confidence interval must be above `by`, so an undecided measurement fails.
    Raises: AssertionError with the ratio, its interval, every difference between the two runs, and the machine's load.
    """
    result = _measured(comparison, engine)
    found = comparison.ratio(result)
    if found is None or found.low is None or found.low < by:
        base = comparison.baseline.engine
        is_so = f"has no ratio over {base}" if found is None else f"is {found} as fast as {base}"
        raise AssertionError(
            f"{result.engine} {is_so}; "
            f"the interval must lie above {by:.2f}x. {' '.join([*comparison.differences(), *comparison.load()])}"
        )


def assert_same_answers(comparison: Comparison, engine: str | None = None, *, share: float = 1.0) -> None:
    """Assert that `engine` (by default the last one) gives the baseline's answer to at least `share` of the inputs.

    Raises: AssertionError that shows the first differing answer.
    """
    result = _measured(comparison, engine)
    differing = comparison.differing(result) or []
    num_equal = len(comparison.inputs) - len(differing)
    if num_equal < share * len(comparison.inputs):
        first = differing[0]
        raise AssertionError(
            f"{result.engine} gives {num_equal} of {len(comparison.inputs)} answers of {comparison.baseline.engine}, "
            f"fewer than {share:.0%}. On {comparison.inputs[first]!r}: {comparison.baseline.answers[first]!r} became "
            f"{result.answers[first]!r}"
        )


def _measured(comparison: Comparison, engine: str | None) -> EngineResult:
    result = comparison.result(engine) if engine is not None else comparison.results[-1]
    for each in (comparison.baseline, result):
        if not each.rounds:
            raise AssertionError(f"{each.engine} was not measured: {each.error or 'the run was interrupted'}")
    return result
