"""What steps of few tokens cost, learnt from those that were run.

StepTimes is a linear model of step time by number of tokens. StepPrices adds what goes by beside a step that is run by
itself, and beside several that are run at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from graftlm.core.execution.step_plan import StepPlan

MAX_NEW = 8
"""Most tokens of a row in a step of few tokens: one that reads a prompt is another matter."""

MAX_STEP = 64
"""Steps of more tokens say nothing about what a token costs: they are bound by computing."""

_SLOPE = 0.04
"""The prior cost of a further token, as a share of an empty step, before anything was measured."""

_TRUST = 40.0
"""Weight of the prior, as the sum over steps of squared distances from their mean size that outweighs it."""

_MEMORY = 0.99
"""Factor by which a step's weight shrinks with each later step."""


_NEWEST = 1 / 16
"""Weight of the newest step in the moving averages of what goes by beside forward passes."""


class StepTimes:
    """Seconds of a step of n tokens as `base + per_token * n`, the least squares over the last hundred steps or so.

    Steps that read the weights and little else are so: a product with one to a few dozen rows waits for memory. A
    step that something held up counts as no more than twice its time; one that took less than half of it says that
    the ones before were held up (compiled, paged in), and they are forgotten.
    """

    def __init__(self) -> None:
        self.base = self.per_token = 0.0
        self._sums = _Sums()

    @property
    def known(self) -> bool:
        return self._sums.weight > 0

    def of(self, num_tokens: float) -> float:
        """Seconds of a step; 0.0 before the first was seen."""
        return self.base + self.per_token * num_tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note that a step of `num_tokens` tokens took `seconds`."""
        expected = self.of(num_tokens)
        if self.known and seconds < expected / 2:
            self._sums = _Sums()
        elif self.known:
            seconds = min(seconds, 2 * expected)
        sums = self._sums
        sums.add(num_tokens, seconds)
        mean, mean_s = sums.tokens / sums.weight, sums.seconds / sums.weight
        spread = sums.squares - sums.tokens * mean
        together = sums.products - sums.seconds * mean
        # minimise spread * (slope - seen)^2 + _TRUST * (slope - _SLOPE * base)^2 with base = mean_s - slope * mean
        share = 1 + _SLOPE * mean
        slope = (together + _TRUST * share * _SLOPE * mean_s) / (spread + _TRUST * share * share)
        self.per_token = min(max(slope, 0.0), mean_s / mean)
        self.base = mean_s - self.per_token * mean


@dataclass
class _Sums:
    """Weighted sums over the steps: of tokens, of seconds, and of their products."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    seconds: float = 0.0
    products: float = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self.weight = self.weight * _MEMORY + 1
        self.tokens = self.tokens * _MEMORY + num_tokens
        self.squares = self.squares * _MEMORY + num_tokens * num_tokens
        self.seconds = self.seconds * _MEMORY + seconds
        self.products = self.products * _MEMORY + num_tokens * seconds


class _Ran(NamedTuple):
    """Steps of which the forward passes took `seconds`."""

    at_once: bool
    seconds: float


class StepPrices:
    """What steps of few tokens cost, in seconds.

    forwards  the forward pass of a step, whether it is run by itself or among several at once

    A step by itself takes time beside that, to be laid out, sampled and committed; several at once take it together.
    """

    def __init__(self) -> None:
        self.forwards = StepTimes()
        self._alone_s = self._at_once_s = 0.0
        self._ran: _Ran | None = None

    @property
    def known(self) -> bool:
        return self.forwards.known

    @property
    def per_token(self) -> float:
        """Seconds of a further token of a step."""
        return self.forwards.per_token

    def alone(self, num_tokens: float) -> float:
        """Seconds of a step that is run by itself; 0.0 before the first was seen."""
        return self.forwards.of(num_tokens) + self._alone_s

    def at_once(self, num_tokens: float, num_steps: int) -> float:
        """Seconds of each of several steps that are run at once."""
        return self.forwards.of(num_tokens) + self._at_once_s / num_steps

    def ran(self, plan: StepPlan, num_steps: int, seconds: float) -> None:
        """Note that the forward passes of a step, or of several at once, took so long."""
        if plan.num_tokens <= MAX_STEP and all(row.num_new <= MAX_NEW for row in plan.rows):
            self.forwards.add(plan.num_tokens, seconds / num_steps)
            self._ran = _Ran(num_steps > 1, seconds)

    def ended(self, seconds: float) -> None:
        """Note how long all took that belongs to the steps that were run last."""
        ran, self._ran = self._ran, None
        if ran is None:
            return
        rest = max(seconds - ran.seconds, 0.0)
        if ran.at_once:
            self._at_once_s = _average(self._at_once_s, rest)
        else:
            self._alone_s = _average(self._alone_s, rest)


def _average(known: float, newest: float) -> float:
    """The moving average; what took less than half of it says that the ones before were held up."""
    if newest < known / 2 or known == 0:
        return newest
    return known + _NEWEST * (min(newest, 2 * known) - known)
