"""Round, Work, Call, Profile, Divergence: one round of an engine, its counts and calls, and the arithmetic on them."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from statistics import median
from typing import Any, Literal

from graftlm.core.media.limits import IMAGE_PARTS, VIDEO_PARTS

Plant = Literal["slow", "changed answer", "cached call"]
"""A fault that `graftlm ab --check` plants, to show that the comparison finds it."""
FRAMEWORK = "framework, between calls"
"""The phase without a model call, and without a prefix computed ahead of one."""


@dataclass(frozen=True)
class Work:
    """Counts over one round; None: the engine gives no such count.

    calls              model calls; a prefix that GraftLM computes ahead of them is none, but its tokens are computed
    prompt_tokens      tokens of all prompts
    computed_tokens    prompt tokens that were run through the model
    completion_tokens  generated tokens; None where a framework picks them from logits, as Guidance does
    largest_batch      the most sequences in one forward pass
    pictures           pictures and videos in all prompts; None without any
    """

    calls: int | None = None
    prompt_tokens: int | None = None
    computed_tokens: int | None = None
    completion_tokens: int | None = None
    largest_batch: int | None = None
    pictures: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that was not computed."""
        if self.computed_tokens is None or not self.prompt_tokens:
            return None
        return 1 - self.computed_tokens / self.prompt_tokens

    def __add__(self, other: Work) -> Work:
        total: dict[str, int | None] = {}
        for one in fields(self):
            values = [value for side in (self, other) if (value := getattr(side, one.name)) is not None]
            add = max if one.name == "largest_batch" else sum
            total[one.name] = add(values) if values else None
        return Work(**total)


@dataclass
class Call:
    """One model call. Times are seconds after the start of the round; None: unknown.

    first_s     time of the first token
    num_prompt  tokens of the prompt, `num_tokens` of the answer
    prompt_ids  the prompt's tokens, `token_ids` the answer's; empty where they are unknown
    """

    begin_s: float
    end_s: float = 0.0
    first_s: float | None = None
    num_tokens: int = 0
    num_prompt: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def after(self, started: float) -> Call:
        """Return the call in seconds after `started`, with the numbers of its tokens."""
        first_s = None if self.first_s is None else self.first_s - started
        num_tokens, num_prompt = len(self.token_ids) or self.num_tokens, len(self.prompt_ids) or self.num_prompt
        return replace(self, begin_s=self.begin_s - started, end_s=self.end_s - started, first_s=first_s,
                       num_tokens=num_tokens, num_prompt=num_prompt)  # fmt: skip

    @property
    def to_first_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.begin_s

    @property
    def between_s(self) -> float | None:
        """Mean time between two tokens."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Round:
    """One measured run of the pipeline over all inputs.

    answers      as JSON values, one per input
    right        the judgement of each answer; None for a pipeline without `right`
    spans        start and end of each model call, in seconds from the start of the round
    peak_bytes   the engine process's peak memory so far: host, and GPU where it uses one
    cpu_s        CPU time of the engine's process and its servers
    other_cores  cores of this machine that other processes, or other virtual machines, used on average
    lost         share of the time in which the engine's threads had no core because of them; below 0: cores were left
    energy_j     energy use of the GPUs, other processes included; None without a counter
    errors       errors that the pipeline or its framework did not raise, one sentence each
    num_failed   calls of models and runtimes that ended in an error
    num_refused  requests that were answered with an error; a client may have sent them again
    caught       errors that `except` clauses of the pipeline's file caught
    prompts      fingerprint of this round's prompts, in any order; None without any
    unfinished   model calls that had not ended when `run` returned, as of threads that it leaves behind
    unread       types of objects in the answers without a text of their own, of which only the type is compared
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
class Profile:
    """One watched round of an engine. Watching costs time: its wall time is part of no ratio.

    phases         seconds of the wall time by phase; they add up to `wall_s`
    unique_tokens  prompt tokens that any engine has to compute, see `num_unique`; None for unknown prompts
    mean_batch     mean number of sequences in a forward pass; None where passes are not seen
    prompts        fingerprint of the token ids of all prompts; None for unknown ones
    """

    wall_s: float
    calls: list[Call]
    phases: dict[str, float]
    unique_tokens: int | None = None
    mean_batch: float | None = None
    prompts: int | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return _median(call.to_first_s for call in self.calls)

    @property
    def mean_under_way(self) -> float | None:
        """Mean number of calls under way; None for an engine without known calls."""
        return sum(call.end_s - call.begin_s for call in self.calls) / self.wall_s if self.calls else None

    @property
    def outside_s(self) -> float:
        """Seconds without a model call, and without a prefix computed ahead of one."""
        return self.phases.get(FRAMEWORK, outside(self.wall_s, self.calls))

    @property
    def time_between_tokens_s(self) -> float | None:
        return _median(call.between_s for call in self.calls)


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers: the first call with the same prompt and other tokens.

    position  number of equal tokens at the start of the answers
    before    the text before the two tokens
    tokens    the baseline's token and the engine's, as text
    logprobs  by engine, the log-probabilities (natural log) of these two tokens at that position
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
    """Return the first call of both with the same prompt and other tokens, and the number of equal first tokens."""
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


def num_unique(prompts: Sequence[Sequence[int]], answers: Iterable[Sequence[int]] = ()) -> int:
    """Count the prompt tokens that any engine must run: each distinct prefix once, at least one token of each prompt.

    answers  the generated tokens of each prompt. A prompt that continues an earlier answer finds its KV, which was
             computed when it was generated; that of an answer's last token was not.
    """
    root: dict[int, Any] = {}
    for prompt, answer in zip(prompts, answers, strict=False):
        node = root
        for token in prompt:
            node = node.setdefault(token, {})
        for token in answer[:-1]:
            node = node.setdefault(token, {})
            node[_COMPUTED] = True
    total = 0
    for prompt in prompts:
        node, new = root, 0
        for token in prompt:
            node = node.setdefault(token, {})
            new += _COMPUTED not in node
            node[_COMPUTED] = True
        total += max(new, 1)
    return total


_COMPUTED = -1
"""Mark of a position whose KV is there; token ids are at least 0."""


def outside(wall_s: float, calls: Iterable[Call]) -> float:
    """Return the seconds without a call."""
    covered, reached = 0.0, 0.0
    for call in sorted(calls, key=lambda call: call.begin_s):
        begin = max(call.begin_s, reached)
        if call.end_s > begin:
            covered += call.end_s - begin
            reached = call.end_s
    return max(0.0, wall_s - covered)


def by_phase(spent: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return seconds by phase, from (phase, begin, end). Of overlapping ones the first to begin counts."""
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


_IDS = {"id", "tool_call_id", "request_id"}
"""Names of ids that clients and servers number anew in every round."""


class Fingerprint:
    """The sum of all prompts' digests: equal for equal prompts in any order, since threads send them in any order.

    num_pictures  pictures and videos in them
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum: int | None = None
        self.num_pictures = 0

    @property
    def value(self) -> int | None:
        """None where no prompt was added."""
        return self._sum

    def add(self, prompt: Any, *, pictures: bool = True) -> None:
        """Add one prompt: text, token ids, messages, or a request's body. Ids of messages do not count.

        pictures  whether its pictures are counted
        """
        text = json.dumps(_plain(prompt), sort_keys=True, default=str)
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
        with self._lock:
            self._sum = ((self._sum or 0) + digest) % 2**48
            self.num_pictures += num_pictures(prompt) if pictures else 0


def num_pictures(prompt: Any) -> int:
    """Return the pictures and videos of a prompt: messages, a request's body, or token ids with spans."""
    if _is(prompt, "graftlm.core.prompt_input", "PromptInput"):
        return sum(getattr(span.values, "first", 0) == 0 for span in prompt.spans)
    if isinstance(prompt, bytes):
        try:
            return num_pictures(json.loads(prompt))
        except ValueError:
            return 0
    if _is(prompt, "graftlm.core.chat.messages", "ImagePart", "VideoPart"):
        return 1
    if _is(prompt, "graftlm.core.media.items", "MediaText"):
        return len(prompt.parts)
    if _is(prompt, "graftlm.core.chat.messages", "Message"):
        return num_pictures(prompt.content)
    if isinstance(prompt, Mapping):
        if prompt.get("type") in IMAGE_PARTS + VIDEO_PARTS:
            return 1
        return sum(num_pictures(prompt[name]) for name in ("messages", "input", "content") if name in prompt)
    if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], int):
        return sum(map(num_pictures, prompt))
    return 0


def _is(value: Any, module: str, *names: str) -> bool:
    """Whether a value is of a class of `module`, which is not imported: another Python may lack its packages."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return _plain(json.loads(value))
        except ValueError:
            return repr(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items() if key not in _IDS}
    if hasattr(value, "tobytes"):  # a picture or an array, of which str shows an address or the ends
        size = repr(getattr(value, "shape", getattr(value, "size", ""))).encode()
        return hashlib.blake2b(size + value.tobytes()).hexdigest()
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
