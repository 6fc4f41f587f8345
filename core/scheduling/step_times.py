"""StepTimes: a linear model of step time by number of tokens, fitted to the steps that were run."""

from __future__ import annotations

from dataclasses import dataclass

_SLOPE = 0.04
"""The prior cost of a further token, as a share of an empty step, before anything was measured."""

_TRUST = 40.0
"""Weight of the prior, as the sum over steps of squared distances from their mean size that outweighs it."""

_MEMORY = 0.99
"""Factor by which a step's weight shrinks with each later step."""


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
