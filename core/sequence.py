"""Sequence: the state of one token sequence in the engine, each part of it written by one module.

`tests/core/test_sequence.py` keeps that law: the modules named here are the only ones that assign to these fields.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from graftlm.core.request import (
    Completion,
    FinishReason,
    Listener,
    OpenRequest,
    Request,
    Submission,
    TokenLogprob,
    Usage,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from graftlm.core.config import SamplingParams
    from graftlm.core.execution.step_plan import SlotMap
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.grammar.matcher import Matcher
    from graftlm.core.kv.radix import Node
    from graftlm.core.metrics import PrefixMiss
    from graftlm.core.prompt_input import PromptInput
    from graftlm.core.sampling.sampler import Sampled
    from graftlm.core.scheduling.choice import Choice
    from graftlm.core.scheduling.speculation import DraftState
    from graftlm.core.scheduling.stop_strings import StopMatcher
    from graftlm.core.text.detokenizer import Detokenizer
    from graftlm.kernels.wire_plan import Extent

SequenceStatus = Literal["waiting", "running", "held", "finished"]


class Bounds(NamedTuple):
    """The limits of a request, set when it is admitted.

    deadline_s  on the engine's clock
    remedy      the option that would give it more tokens, as the end of a sentence; "" if there is none
    """

    max_new_tokens: int = 0
    seed: int = 0
    deadline_s: float | None = None
    remedy: str = ""


@dataclass(eq=False, slots=True)
class Progress:
    """How many tokens of a sequence are computed or in flight. Written by scheduling/scheduler.py.

    num_computed   tokens whose KV is in the pool, or will be once the launched steps have run
    num_in_flight  tokens that launched steps sample and the host does not know yet
    pending_index  place of the newest of these among the tokens of its step
    num_reused     tokens that were in the cache when the sequence last started
    num_cached     tokens of the prompt that were in the cache at its first step; None before
    started_s      when the sequence first started, on the clock of `arrived_s`; None before
    miss           where the prompt left the cache when the sequence first started
    """

    status: SequenceStatus = "waiting"
    num_computed: int = 0
    num_in_flight: int = 0
    pending_index: int = -1
    num_reused: int = 0
    num_cached: int | None = None
    started_s: float | None = None
    miss: PrefixMiss | None = None


@dataclass(eq=False, slots=True)
class HeldSlots:
    """The KV slots of a sequence, in order of its tokens. Written by kv/prefix_cache.py.

    node        the locked radix node that the cached prefix ends at
    shared      slots of the first `num_shared` tokens: those of `node` and its ancestors
    own         slots of the sequence alone, which may reach further than its tokens
    state       the slot of its state, while it runs a model that has layers with a state
    """

    node: Node | None = None
    shared: list[Extent] = field(default_factory=list)
    num_shared: int = 0
    own: list[Extent] = field(default_factory=list)
    state: int | None = None

    @property
    def capacity(self) -> int:
        """Tokens that the slots have room for."""
        num_own = 0
        for start, stop in self.own:
            num_own += stop - start
        return self.num_shared + num_own


@dataclass(eq=False, slots=True)
class Output:
    """The generated text. Written by scheduling/output_writer.py.

    num_spelled  generated tokens that are in `text`, which is brought up to date when somebody reads it
    stopped_by   the stop string or token id that ended the text
    first_s      when the first token was generated; None before
    """

    matcher: Matcher | None = None
    detokenizer: Detokenizer | None = None
    stop_matcher: StopMatcher | None = None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_forced: int = 0
    num_spelled: int = 0
    num_streamed: int = 0
    num_streamed_tokens: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    first_s: float | None = None


@dataclass(eq=False, slots=True)
class Readout:
    """Scores or logits of a request that generates nothing. Written by sampling/step_sampler.py."""

    scores: list[Sampled] = field(default_factory=list)
    logits: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One token sequence in the engine; a request with n > 1 has n of them.

    prompt      when scoring, followed by all but the last of score_ids
    prompt_ids  the ids of `prompt`, int32 [num_prompt_tokens]
    grammar     the constraint's grammar, perhaps still being compiled; a fork has its parent's matcher instead
    choice      the choice that this sequence scores an option of
    tokens      the prompt followed by the generated tokens that the host knows. Written by scheduling/output_writer.py
    bounds      Written by scheduling/request_tracker.py
    group       None once the request has ended
    slot_map    Written by execution/step_plan.py
    counted     generated and forced tokens that are in the counters. Written by scheduling/request_tracker.py
    number      of this sequence, by which a runner knows it (WirePlan.sequences)
    draft       how guesses of the next tokens fared. Written by scheduling/speculation.py

    For the garbage collector's sake `tokens` is an array (of a list it would visit every token), the classes have
    slots, and an ended request's sequences let go of their group, so that what they held is freed at once.
    """

    request: Request
    prompt: PromptInput
    prompt_ids: np.ndarray = field(init=False, repr=False)
    index: int = 0
    grammar: Future[Grammar] | None = None
    choice: Choice | None = None
    arrived_s: float = field(default_factory=time.monotonic)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    bounds: Bounds = Bounds()
    group: SequenceGroup | None = None
    progress: Progress = field(default_factory=Progress)
    kv: HeldSlots = field(default_factory=HeldSlots)
    output: Output = field(default_factory=Output)
    readout: Readout = field(default_factory=Readout)
    slot_map: SlotMap | None = field(default=None, repr=False)
    draft: DraftState | None = field(default=None, repr=False)
    counted: tuple[int, int] = (0, 0)
    number: int = field(default_factory=count().__next__)

    def __post_init__(self) -> None:
        self.prompt_ids = self.prompt.ids
        if not self.tokens:
            self.tokens = array("i", self.prompt_ids.astype(np.int32, copy=False).tobytes())

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def ids(self) -> np.ndarray:
        """All known tokens, int32 [num_tokens]."""
        if len(self.tokens) == len(self.prompt_ids):
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.array(self.output_ids, np.int32)], dtype=np.int32)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 for a row that only decodes."""
        progress = self.progress
        return len(self.tokens) + progress.num_in_flight - progress.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :].tolist()

    @property
    def scoring(self) -> bool:
        return self.request.score_ids is not None

    @property
    def first_logit(self) -> int:
        """The first position whose logits are wanted."""
        if self.request.score_ids is not None:
            return len(self.prompt_ids) - len(self.request.score_ids)
        return len(self.tokens) + self.progress.num_in_flight - 1

    @property
    def ready(self) -> bool:
        """Whether the last token may run: the tokens that a grammar forces at the start have been appended."""
        return self.grammar is None or self.output.matcher is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated after the known ones."""
        return self.bounds.max_new_tokens - self.num_generated

    @property
    def exhausted(self) -> bool:
        """Whether the tokens in flight are the last ones, whatever they turn out to be."""
        return self.progress.num_in_flight > 0 and self.progress.num_in_flight >= self.remaining

    @property
    def forks(self) -> bool:
        """Whether the next token makes this sequence the several that its request asks for."""
        return self.group is not None and len(self.group.sequences) < self.request.sampling.n

    @property
    def constrained(self) -> bool:
        """Whether the allowed tokens depend on those before. A fork has a matcher and no grammar."""
        return self.grammar is not None or self.output.matcher is not None


@dataclass(eq=False)
class SequenceGroup:
    """The n sequences of one request and their results. `id` is the submission's."""

    id: int
    request: Request
    listener: Listener
    sequences: list[Sequence] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    done: bool = False

    @classmethod
    def of(cls, submission: Submission) -> SequenceGroup:
        """Return a group with one sequence: the prompt, followed by all but the last of the tokens to score."""
        request, prompt = submission.request, submission.prompt
        assert prompt is not None, "a local engine takes rendered prompts"
        prompt = prompt.extended((request.score_ids or [])[:-1])
        group = cls(submission.id, request, submission.listener)
        arrived_s = submission.arrived_s
        group.sequences.append(Sequence(request, prompt, grammar=submission.grammar, arrived_s=arrived_s, group=group))
        return group

    def progress(self, now_s: float) -> OpenRequest:
        """How far the request has come."""
        first = self.sequences[0]
        num_generated = sum(sequence.num_generated for sequence in list(self.sequences))
        cached, age_s = first.progress.num_cached, now_s - first.arrived_s
        return OpenRequest(self.request.id, first.num_prompt_tokens, cached, num_generated, age_s)

    def end(self) -> None:
        """Mark the request as ended and break the reference cycle between it and its sequences."""
        self.done = True
        for sequence in self.sequences:
            sequence.group = None

    @property
    def completion(self) -> Completion:
        """One completion of all n: the first, with the others beside it and usage that counts the prompt once."""
        ordered = [self.completions[i] for i in sorted(self.completions)]
        first = ordered[0]
        if len(ordered) == 1:
            return first
        usage = Usage(
            first.usage.prompt_tokens,
            first.usage.cached_tokens,
            sum(c.usage.completion_tokens for c in ordered),
            sum(c.usage.forced_tokens for c in ordered),
            sum(c.usage.reasoning_tokens for c in ordered),
        )
        return replace(first, usage=usage, completions=ordered)
