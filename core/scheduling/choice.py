"""Choice: select among whole texts inside a sequence by their likelihood, not token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from typing import Protocol, cast

from graftlm.core.request import Request
from graftlm.core.sampling.sampler import Sampled
from graftlm.core.sequence import Progress, Sequence


class Chooser(Protocol):
    """A matcher that knows where one of several texts is to be chosen as a whole."""

    def options(self, context: Seq[int]) -> list[list[int]]:
        """The tokens of each text that may stand here, after `context`; [] where nothing is to be chosen."""
        ...


class Choice:
    """One of several continuations of `sequence`, each of which is scored by a sequence of its own.

    The sequence waits outside of the batch meanwhile, its KV in the prefix cache, where the scoring sequences find it.
    """

    def __init__(self, sequence: Sequence, options: list[list[int]]) -> None:
        self.sequence = sequence
        self.options = options
        self.scoring = [self._score(option) for option in options]
        self._num_left = len(options)

    @classmethod
    def at(cls, sequence: Sequence) -> Choice | None:
        """The choice at the end of `sequence`; None where there is none, or no room is left for it.

        A request for several answers goes on token by token: its answers are to differ.
        """
        options_of = getattr(sequence.output.matcher, "options", None)
        if options_of is None or sequence.output.matcher is None or sequence.sampling.n > 1:
            return None
        options = cast("Chooser", sequence.output.matcher).options(sequence.tokens)
        if len(options) < 2:
            return None
        longest = max(map(len, options))
        if longest + sequence.output.matcher.min_tokens_to_accept() > sequence.remaining:
            return None
        return cls(sequence, options)

    def scored(self) -> bool:
        """Count a scoring sequence that has ended; True if it was the last."""
        self._num_left -= 1
        return self._num_left == 0

    def best(self) -> list[Sampled]:
        """The chosen tokens with their log-probabilities.

        At temperature 0 the likeliest option; above, one drawn by the options' likelihoods to the power of 1 /
        temperature, the same for the same seed and place.
        """
        totals = [math.fsum(scored.logprob or 0.0 for scored in one.readout.scores) for one in self.scoring]
        temperature = self.sequence.sampling.temperature
        index = max(range(len(totals)), key=totals.__getitem__)
        if temperature > 0:
            peak = totals[index]
            weights = [math.exp((total - peak) / temperature) for total in totals]
            drawn = random.Random(f"{self.sequence.bounds.seed}/{self.sequence.num_generated}")
            (index,) = drawn.choices(range(len(totals)), weights)
        return self.scoring[index].readout.scores

    @property
    def num_reused(self) -> int:
        """Tokens of the sequence's prompt that were in the cache before any option was scored."""
        return min(min(one.progress.num_reused for one in self.scoring), self.sequence.num_prompt_tokens)

    def _score(self, option: list[int]) -> Sequence:
        parent = self.sequence
        return Sequence(
            Request([], score_ids=option, namespace=parent.request.namespace),
            parent.prompt.extended([*parent.output_ids, *option[:-1]]),
            index=parent.index,
            choice=self,
            arrived_s=parent.arrived_s,
            group=parent.group,
            progress=Progress(num_cached=0),  # no prompt of its own to be counted
        )
