"""Assertions about a comparison, for the tests of a user's own project."""

from __future__ import annotations

from graftlm.ab.comparison import Comparison, EngineResult


def assert_faster(comparison: Comparison, engine: str | None = None, *, by: float = 1.0) -> None:
    """Assert that `engine` (by default the last one) is at least `by` times as fast as the baseline.

    The whole confidence interval must be above `by`, so an undecided measurement fails.
    Raises: AssertionError with the ratio, its interval, every difference between the two runs, and what other
    processes did to them.
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
