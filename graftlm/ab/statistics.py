"""The ratio of two engines' wall times with its confidence interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

BETWEEN_RUNS = 0.05
"""Standard deviation of the logarithm of the ratio between runs of many rounds each, on an otherwise idle machine:
processes start anew, with other memory, and a virtual machine's neighbours change.
"""
SPINNING = 5.0
"""Factor of the logarithm of 1 / (1 - lost) for engines with several threads, which busy-wait for each other at every
step. A stock engine was 15 times as slow without half of its cores, twice as slow without an eighth: factors 2 to 5.
"""
MIN_ROUNDS = 3
"""Least number of rounds for an interval: with two, Student's t is 12.7."""
NUM_RESAMPLES = 4000
Z_95 = 1.96
MAX_CORRELATION = 0.9
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of wall times with its 95 % confidence interval; above 1 if the engine is faster than the baseline.

    `low` and `high` are None for fewer than MIN_ROUNDS rounds.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def width(self) -> float:
        """The interval's width relative to the ratio; infinite without an interval."""
        return math.inf if self.low is None or self.high is None else (self.high - self.low) / self.value

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f}x{interval}"


def ratio(baseline_s: Sequence[float], engine_s: Sequence[float], lost: float = 0.0, threads: int = 1) -> Ratio:
    """Compute the median ratio over interleaved rounds, with a 95 % interval that includes the spread between runs.

    baseline_s, engine_s  wall times of the same rounds, in order
    lost                  share of their time, 0 to below 1, in which the engines' threads had no core
    threads               compute threads of each engine

    The variance of the ratio's logarithm is the sum of three:

    - Rounds: a bootstrap of their median. Percentile intervals of a few rounds are too narrow, so it is stretched
      by t / z * sqrt(n / (n - 1)). Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015). Correlated
      rounds, as with a drifting load of the machine, count for fewer: by sqrt((1 + r) / (1 - r)), where r is the
      correlation of each round with the next, if it is above 0.
    - Runs, which no number of rounds averages out: BETWEEN_RUNS.
    - Other processes: threads without cores can take 1 / (1 - lost) times as long, and one engine can lose more than
      the other. The difference between them is half of the logarithm of this factor; for engines with several
      threads, SPINNING times the logarithm.
    """
    logs = [math.log(a / b) for a, b in zip(baseline_s, engine_s, strict=True)]
    center, n = median(logs), len(logs)
    if n < MIN_ROUNDS:
        return Ratio(math.exp(center), None, None)
    rng = random.Random(0)  # deterministic: the same rounds give the same interval
    medians = sorted(median(rng.choices(logs, k=n)) for _ in range(NUM_RESAMPLES))
    tail = int(0.025 * NUM_RESAMPLES)
    t = T_95[n - 2] if n - 2 < len(T_95) else Z_95
    r = min(max(_correlation(logs), 0.0), MAX_CORRELATION)
    stretch = t / Z_95 * math.sqrt(n / (n - 1) * (1 + r) / (1 - r))
    run = math.hypot(Z_95 * BETWEEN_RUNS, math.log(1 - lost) * (0.5 if threads == 1 else SPINNING))
    low = math.hypot(stretch * (center - medians[tail]), run)
    high = math.hypot(stretch * (medians[-tail - 1] - center), run)
    return Ratio(math.exp(center), math.exp(center - low), math.exp(center + high))


def _correlation(values: Sequence[float]) -> float:
    """Return the correlation of each value with the previous one, -1 to 1; 0 for fewer than four values."""
    if len(values) < 4:
        return 0.0
    middle = fmean(values)
    total = sum((value - middle) ** 2 for value in values)
    if not total:
        return 0.0
    found = sum((a - middle) * (b - middle) for a, b in pairwise(values)) / total
    return found + (1 + 3 * found) / len(values)  # corrects the bias of short series. Source: Kendall, Biometrika 1954
