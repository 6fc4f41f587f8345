"""Prompt-lookup speculation: guess how a text goes on from where it was written before, and run the guess along.

A step on a CPU waits for the weights: with a few more tokens it takes little longer. What pipelines let a model write
often stands in its prompt, or was written a moment ago: names, keys, quoted passages. So a row may carry *drafts*,
tokens that nobody has sampled yet. The step gives logits after each of them; its first position is sampled as in any
step, and as long as the sampled token is the draft, the next position's logits are at hand as well and are sampled too.
Every token is one that the ordinary sampler drew from the logits after the true text, so nothing is rejected and
redrawn, and answers are those of single steps: penalties, masks, seeds, stops and log-probabilities see no difference.

On a GPU there are none: a step of drafts must be sampled before the next is known, and there the next step is launched
while the tokens of the last are on their way, which is worth more. Nor in the serial lane, whose caches cannot be cut.

The number of drafts follows from two learnt figures: what a token costs (`StepPrices`) and how often guesses came true,
by the length of what matched and by sequence (`AcceptanceRate`). Where steps can be run at once (`steps_ahead.py`), one
with drafts must beat them, which share what goes by beside them. Guesses are followed up even where they were not run,
at no cost, so that a text that begins to copy is noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graftlm.core.errors import GraftError, failure_of
from graftlm.core.execution.step_plan import PlanRow, ScheduledRow, StepPlan
from graftlm.core.sampling.sampler import is_greedy
from graftlm.core.scheduling.ngram_lookup import Recent, find
from graftlm.core.scheduling.scheduler import AHEAD, Failure
from graftlm.core.scheduling.step_times import MAX_NEW, MAX_STEP, StepPrices

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from graftlm.core.sampling.sampler import Sampled
    from graftlm.core.scheduling.request_tracker import RequestTracker
    from graftlm.core.sequence import Sequence

MAX_MATCH = 6
"""Most tokens at a text's end that are looked for."""

_MARGIN = 1.1
"""How many times the tokens a second of steps at once drafts must promise: the likeliest of many guesses come true less
often than their chances say, and after a step with drafts fewer steps are run at once."""

_RECENT_TOKENS = 8192
_RECENT_NAMESPACES = 32
_FEW_ROWS = 4
"""Up to this many rows are looked up in every step; with more, rows whose drafts were rejected pause a while."""
_LEAST_STEPS = 4
"""Steps that more rows run at once where no draft was worth it: one of them is nearly always due for a look."""
_LONGEST_REST = 16

_FIRST_ODDS = (0.15, 0.4, 0.55, 0.65, 0.75, 0.8)
"""How often a guess comes true after a match of 1, 2, ... tokens, before anything was seen."""


class AcceptanceRate:
    """How often a guess came true, by the length of what matched before it."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._tried = [0.0] * MAX_MATCH
        self._true = [0.0] * MAX_MATCH

    def add(self, length: int, came_true: bool) -> None:
        i = min(length, MAX_MATCH) - 1
        if self._tried[i] >= self._memory:
            self._tried[i] /= 2
            self._true[i] /= 2
        self._tried[i] += 1
        self._true[i] += came_true

    def chance(self, length: int, otherwise: float, weight: float) -> float:
        """The chance after a match of `length`, where `otherwise` counts as much as `weight` guesses."""
        i = min(length, MAX_MATCH) - 1
        return (self._true[i] + weight * otherwise) / (self._tried[i] + weight)


@dataclass(eq=False)
class DraftState:
    """Drafting state of one sequence: its last guess, and how its guesses fared.

    guess    tokens that were guessed to follow the first `made_at`, of which the last `matched` stand elsewhere too
    rest     tokens for which it is not looked up again; `idle` counts the guesses in a row that were not worth running
    """

    odds: AcceptanceRate = field(default_factory=lambda: AcceptanceRate(memory=16))
    guess: list[int] = field(default_factory=list)
    made_at: int = 0
    matched: int = 0
    idle: int = 0
    rest: int = 0


class Drafter:
    """Adds drafts to the rows of a step, where they are worth their time.

    eos_token_ids  a guess ends before the end of a text
    patience       steps that may go by before a row is looked up again, after a step without drafts
    """

    def __init__(self, eos_token_ids: Seq[int], max_step_tokens: int, prices: StepPrices) -> None:
        self.prices = prices
        self.patience = AHEAD
        self.odds = AcceptanceRate(memory=128)
        self._eos = frozenset(eos_token_ids)
        self._max_step = min(MAX_STEP, max_step_tokens)
        self._recent: OrderedDict[str, Recent] = OrderedDict()
        self.failures: list[Failure] = []

    def extend(self, scheduled: list[ScheduledRow], num_steps: int = 1) -> list[ScheduledRow]:
        """The rows of a step with the drafts that shorten the expected time of a token.

        Drafts use slots that their sequence holds anyway, and none where the step is long already.
        num_steps  how many steps can be run at once where none carries drafts
        """
        self.patience = AHEAD
        if any(row.num_new > MAX_NEW for row in scheduled):
            return scheduled
        num_tokens = sum(row.num_new for row in scheduled)
        expected = float(sum(row.num_logits > 0 for row in scheduled))  # tokens that the step gives
        prices = self.prices
        if not prices.known or num_tokens >= self._max_step or not expected:
            return scheduled
        seconds = prices.alone(num_tokens)
        plain = expected / seconds  # tokens a second
        if num_steps > 1:
            plain = _MARGIN * expected / prices.at_once(num_tokens, num_steps)
        if prices.per_token * expected > 0.95 * seconds:
            return scheduled  # a further token costs about as much as it could ever give
        chances: list[tuple[float, int]] = []
        for i, row in enumerate(scheduled):
            try:
                if self._takes(row) and self._due(row.sequence, len(scheduled)):
                    chances += [(chance, i) for chance in self._guess(row)]
            except BaseException as error:
                self.failures.append(Failure(row.sequence, failure_of(error)))
        counts = [0] * len(scheduled)
        # a draft is worth it if it adds a greater share of tokens than of time; the likeliest come first
        for chance, i in sorted(chances, key=_chance, reverse=True)[: self._max_step - num_tokens]:
            if chance * seconds <= prices.per_token * expected:
                break
            counts[i] += 1
            expected += chance
            seconds += prices.per_token
        if expected <= plain * seconds:
            counts = [0] * len(scheduled)
        for i, row in enumerate(scheduled):
            known = row.sequence.draft
            if known is None:
                continue
            if known.made_at == row.sequence.num_tokens:
                known.idle = 0 if counts[i] else known.idle + 1
                known.rest = 0 if counts[i] else min(1 << known.idle, _LONGEST_REST)
            self.patience = min(self.patience, max(1, known.made_at + known.rest - row.sequence.num_tokens))
        if len(scheduled) > _FEW_ROWS:
            self.patience = max(self.patience, _LEAST_STEPS)
        return [self._drafted(row, counts[i]) if counts[i] else row for i, row in enumerate(scheduled)]

    def look_up(self, text: NDArray[np.int32], namespace: str, most: int) -> tuple[int, list[int]]:
        """How many of the last tokens of `text` were found elsewhere, and up to `most` tokens that follow there."""
        own = find(text[:-1], text, MAX_MATCH)
        recent = self._recent.get(namespace)
        other = find(recent.ids, text, MAX_MATCH) if recent is not None else None
        if recent is not None and other is not None and (own is None or other.length > own.length):
            return other.length, recent.after(other.stop, most).tolist()
        if own is None:
            return 0, []
        following: list[int] = np.resize(text[own.stop :], most).tolist()  # what repeats itself goes on doing so
        return own.length, following

    def remember(self, sequence: Sequence) -> None:
        """Keep what was written, and the words before it, for texts to come."""
        recent = self._recent.setdefault(sequence.request.namespace, Recent(_RECENT_TOKENS))
        self._recent.move_to_end(sequence.request.namespace)
        if len(self._recent) > _RECENT_NAMESPACES:
            self._recent.popitem(last=False)
        if sequence.num_generated:
            first = max(0, sequence.num_prompt_tokens - MAX_MATCH)
            recent.add(np.array(sequence.tokens[first:], np.int32))

    def forget(self) -> None:
        """Forget all texts that were kept."""
        self._recent.clear()

    def _takes(self, row: ScheduledRow) -> bool:
        """Whether the row's step samples one token after all that is known of its text."""
        sequence = row.sequence
        return (
            row.num_logits == 1
            and row.num_new == sequence.num_pending
            and not (sequence.scoring or sequence.request.want_logits or sequence.forks)
            and sequence.ready
            and getattr(sequence.output.matcher, "goes_back", True)
        )

    def _due(self, sequence: Sequence, num_rows: int) -> bool:
        known = sequence.draft
        return known is None or num_rows <= _FEW_ROWS or sequence.num_tokens >= known.made_at + known.rest

    def _guess(self, row: ScheduledRow) -> list[float]:
        """Guess how the text goes on; the chance of each guessed token to be reached and to come true."""
        sequence = row.sequence
        known = self._known(sequence)
        known.guess = []
        known.made_at = sequence.num_tokens
        most = min(MAX_NEW - row.num_new, sequence.remaining - 1, sequence.kv.capacity - sequence.num_tokens)
        if most <= 0:
            return []
        text = np.frombuffer(sequence.tokens, np.int32)  # a view: the tokens cannot grow while it is held
        known.matched, ids = self.look_up(text, sequence.request.namespace, most)
        del text
        known.guess = self._allowed(sequence, ids)
        chances: list[float] = []
        reached = 1.0
        for length in range(known.matched, known.matched + len(known.guess)):
            reached *= self._chance(known, length)
            chances.append(reached)
        return chances

    def _known(self, sequence: Sequence) -> DraftState:
        """What is known of a sequence, brought up to date: has the last guess come true?"""
        known = sequence.draft
        if known is None:
            known = sequence.draft = DraftState()
            return known
        since = sequence.tokens[known.made_at :]
        for i, (guessed, written) in enumerate(zip(known.guess, since, strict=False)):
            for odds in (self.odds, known.odds):
                odds.add(known.matched + i, guessed == written)
            if guessed != written:
                break
        return known

    def _chance(self, known: DraftState, length: int) -> float:
        usual = self.odds.chance(length, _FIRST_ODDS[min(length, MAX_MATCH) - 1], weight=8)
        return known.odds.chance(length, usual, weight=4)

    def _allowed(self, sequence: Sequence, ids: list[int]) -> list[int]:
        """`ids` up to where the text would end, or its grammar does not allow the next."""
        sampling = sequence.sampling
        ends = self._eos if not sampling.ignore_eos or sequence.output.matcher is not None else frozenset()
        for i, token_id in enumerate(ids):
            if token_id < 0 or token_id in ends or token_id in sampling.stop_token_ids:
                ids = ids[:i]
                break
        if sequence.output.matcher is not None and ids:
            accepted = sequence.output.matcher.advance(ids)
            sequence.output.matcher.rollback(accepted)
            ids = ids[:accepted]
        return ids

    def _drafted(self, row: ScheduledRow, count: int) -> ScheduledRow:
        assert row.sequence.draft is not None
        drafts = tuple(row.sequence.draft.guess[:count])
        return ScheduledRow(row.sequence, row.num_new + count, 1 + count, drafts)


def _chance(item: tuple[float, int]) -> float:
    return item[0]


class Further(NamedTuple):
    """Rows that are sampled further, one position each. logits [num_rows, vocab_size]"""

    plan: StepPlan
    logits: torch.Tensor


@dataclass(eq=False)
class _Checked:
    """A drafted row, where its logits begin, and how many of its drafts came true so far."""

    row: PlanRow
    offset: int
    agreed: int = 0


class DraftVerifier:
    """The drafted rows of a step whose first position was sampled: which of them can be sampled further?

    num_accepted  drafts after which a token was sampled, or is about to be
    """

    def __init__(self, plan: StepPlan, logits: torch.Tensor, rewind: Callable[[Sequence, int], None]) -> None:
        self.plan, self.logits = plan, logits
        self._rewind = rewind
        self.num_accepted = 0
        self._going: list[_Checked] = []
        offset = 0
        for row, num_logits in zip(plan.rows, plan.num_logits_per_row, strict=True):
            if row.drafts:
                self._going.append(_Checked(row, offset))
            offset += num_logits

    def following(self) -> Further | None:
        """The rows whose text still is what the step computed; None if none is left.

        Counts the drafts that came true as computed. Call after each round of tokens was written.
        """
        self._going = [one for one in self._going if self._goes_on(one)]
        if not self._going:
            return None
        rows = tuple(one.row for one in self._going)
        picked = [one.offset + one.agreed for one in self._going]
        return Further(replace(self.plan, rows=rows, num_logits_per_row=(1,) * len(rows)), self.logits[picked])

    @property
    def greedy(self) -> bool:
        """Whether each drafted row takes the likeliest tokens, whatever was written before."""
        return all(is_greedy(one.row.sequence) and not one.row.sequence.constrained for one in self._going)

    def commit(self, likeliest: Seq[list[Sampled] | GraftError], requests: RequestTracker) -> None:
        """Append the likeliest token after each draft that came true. Every drafted row must be `greedy`.

        likeliest  for each row of the step's logits
        """
        for one in self._going:
            while self._goes_on(one):
                outcome = likeliest[one.offset + one.agreed]
                if isinstance(outcome, GraftError):
                    requests.fail(one.row.sequence, outcome)
                else:
                    requests.append(one.row.sequence, outcome)

    def _goes_on(self, one: _Checked) -> bool:
        row, sequence = one.row, one.row.sequence
        if sequence.progress.status != "running":
            return False  # it has ended, or waits outside, and holds no slots
        known = row.kv_len - len(row.drafts)
        written = sequence.tokens[known:]
        agreed = _agreed(written, row.drafts)
        self.num_accepted += agreed - one.agreed
        one.agreed = agreed
        self._rewind(sequence, known + agreed)
        return agreed == len(written)


def _agreed(written: Seq[int], drafts: Seq[int]) -> int:
    """How many tokens are as drafted, from the first."""
    count = 0
    for token_id, draft in zip(written, drafts, strict=False):
        if token_id != draft:
            break
        count += 1
    return count
