"""Profile: every model call of one round that is not timed against others: when it began, spoke first and ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

FRAMEWORK = "framework, between calls"
"""The phase in which no model call was under way, and no prefix was computed ahead of one."""


@dataclass
class Call:
    """One model call. Times are seconds after the start of the round; None: not known.

    first_s     when its first token was there
    num_prompt  tokens of the prompt, `num_tokens` those of the answer
    prompt_ids  the prompt's tokens, `token_ids` those of the answer; empty where they are not known
    """

    begin_s: float
    end_s: float = 0.0
    first_s: float | None = None
    num_tokens: int = 0
    num_prompt: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def to_first_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.begin_s

    @property
    def between_s(self) -> float | None:
        """Mean time between two tokens."""
        return (
            None if self.first_s is None or self.num_tokens < 2 else (self.end_s - self.first_s) / (self.num_tokens - 1)
        )


@dataclass(frozen=True)
class Profile:
    """One round of one engine, looked at closely, which costs time: its wall time is in no ratio.

    phases         seconds of the wall time by what they were spent on; they add up to `wall_s`
    unique_tokens  prompt tokens that any engine has to compute: each distinct prefix once; None if prompts are unknown
    mean_batch     sequences in a forward pass on average; None where passes are not seen
    prompts        tells the token ids of all prompts from others, whatever their order; None if they are not known
    """

    wall_s: float
    calls: list[Call]
    phases: dict[str, float]
    unique_tokens: int | None = None
    mean_batch: float | None = None
    prompts: int | None = None

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Profile:
        return cls(**(found | {"calls": [Call(**call) for call in found["calls"]]}))

    @property
    def time_to_first_token_s(self) -> float | None:
        return _median(call.to_first_s for call in self.calls)

    @property
    def outside_s(self) -> float:
        """Seconds in which no model call was under way, and no prefix was computed ahead of one."""
        return self.phases.get(FRAMEWORK, outside(self.wall_s, self.calls))

    @property
    def time_between_tokens_s(self) -> float | None:
        return _median(call.between_s for call in self.calls)


@dataclass(frozen=True)
class Divergence:
    """Where a differing answer begins to differ: the first call with the same prompt and other tokens.

    position  how many tokens of the answer are the same
    before    the text before the two tokens
    tokens    the baseline's token and the engine's, as text
    logprobs  by engine, the log-probabilities (natural log) of these two tokens at that place
    """

    input: int
    call: int
    position: int
    before: str
    tokens: tuple[str, str]
    logprobs: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        said = "; ".join(f"{engine}: {a:.4f} and {b:.4f}" for engine, (a, b) in self.logprobs.items())
        return (
            f"call {self.call + 1}, token {self.position + 1}: {self.tokens[0]!r} became {self.tokens[1]!r} after "
            f"{self.before[-60:]!r}; log-probabilities {said or 'are not known'}"
        )


def first_difference(ours: Sequence[Call], theirs: Sequence[Call]) -> tuple[int, int] | None:
    """The first call of both whose prompt is the same and whose tokens differ, and how many tokens are the same."""
    by_prompt: dict[tuple[int, ...], list[Call]] = {}
    for call in theirs:
        by_prompt.setdefault(tuple(call.prompt_ids), []).append(call)
    for index, call in enumerate(ours):
        others = by_prompt.get(tuple(call.prompt_ids)) if call.prompt_ids else None
        other = others.pop(0) if others else None
        if other is not None and other.token_ids != call.token_ids:
            pairs = zip(call.token_ids, other.token_ids, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            return (index, min(len(call.token_ids), len(other.token_ids)) if same is None else same)
    return None


def num_unique(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens that any engine must run: each distinct prefix once, and the last token of each prompt."""
    root: dict[int, Any] = {}
    total = 0
    for prompt in prompts:
        node, new = root, 0
        for token in prompt:
            new += token not in node
            node = node.setdefault(token, {})
        total += max(new, 1)
    return total


def outside(wall_s: float, calls: Iterable[Call]) -> float:
    """Seconds in which no call was under way."""
    covered, reached = 0.0, 0.0
    for call in sorted(calls, key=lambda call: call.begin_s):
        begin = max(call.begin_s, reached)
        if call.end_s > begin:
            covered += call.end_s - begin
            reached = call.end_s
    return max(0.0, wall_s - covered)


def by_phase(spent: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds by phase, from (phase, begin, end). Where several run at once, the one that began first counts."""
    total: dict[str, float] = {}
    reached = -math.inf
    for phase, begin, end in sorted(spent, key=lambda one: one[1]):
        if end > max(begin, reached):
            total[phase] = total.get(phase, 0.0) + end - max(begin, reached)
            reached = end
    return total


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
