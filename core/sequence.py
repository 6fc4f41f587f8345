"""Sequence: one token sequence on its way through the engine; a request with n > 1 has n of them."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from graftlm.core.request import Completion, FinishReason, Listener, Request, Submission, TokenLogprob, Usage

if TYPE_CHECKING:
    from concurrent.futures import Future

    from graftlm.core.config import SamplingParams
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.grammar.matcher import Matcher
    from graftlm.core.kv.pages import Extent
    from graftlm.core.kv.radix import Node
    from graftlm.core.metrics import PrefixMiss
    from graftlm.core.scheduling.choice import Choice
    from graftlm.core.scheduling.stop_strings import StopMatcher
    from graftlm.core.text.detokenizer import Detokenizer

SequenceStatus = Literal["waiting", "running", "held", "finished"]


@dataclass(eq=False, slots=True)
class Sequence:
    """One token sequence on its way through the engine; a request with n > 1 has n of them.

    `tokens` is the prompt followed by the generated tokens that the host knows. `num_in_flight` further tokens belong
    to steps in flight; `pending_index` is the place of the newest among the tokens of its step. KV of the first
    `num_computed` tokens is in the pool, or will be once the launched steps have run: the first `num_shared` of them
    in locked radix nodes (`node` and its ancestors), the rest in slots that this sequence owns (`own`), which may reach
    further than num_computed.

    `tokens` are int32 in an array: of a list the garbage collector would look at every token, again and again. For
    its sake there are slots, too, and `group` is None once the request has ended: what it held is freed at once.
    """

    request: Request
    prompt_ids: np.ndarray  # int32 [num_prompt_tokens]; when scoring, with all but the last of score_ids
    index: int = 0
    listener: Listener | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    status: SequenceStatus = "waiting"
    num_computed: int = 0
    num_in_flight: int = 0
    pending_index: int = -1
    num_shared: int = 0
    num_reused: int = 0
    num_cached: int | None = None
    num_forced: int = 0
    node: Node | None = None
    shared: list[Extent] = field(default_factory=list)
    own: list[Extent] = field(default_factory=list)
    matcher: Matcher | None = None
    detokenizer: Detokenizer | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    seed: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    deadline_s: float | None = None
    max_new_tokens: int = 0
    grammar: Future[Grammar] | None = None
    miss: PrefixMiss | None = None
    group: SequenceGroup | None = None
    text: str = ""
    stop_matcher: StopMatcher | None = None
    num_spelled: int = 0
    """Generated tokens that are in `text`; it is brought up to date where somebody looks at it."""
    num_streamed: int = 0
    num_streamed_tokens: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    logits: np.ndarray | None = None
    pin: int | None = None
    slot_map: Any = field(default=None, repr=False)
    """Where its KV lies, as the plan last laid it out (`graftlm.core.step_plan.SlotMap`)."""
    choice: Choice | None = None
    """What this sequence scores an option of."""
    lane: Any = None
    """What the runner keeps for this sequence (the serial lane's own cache)."""
    draft_state: Any = field(default=None, repr=False)
    """How guesses of its next tokens fared (`graftlm.core.scheduling.speculation.DraftState`)."""

    def __post_init__(self) -> None:
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
        return len(self.tokens) + self.num_in_flight - self.num_computed

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
        return len(self.tokens) + self.num_in_flight - 1

    @property
    def ready(self) -> bool:
        """Whether its last token may run: what its grammar forces at the start has been appended, if it has one."""
        return self.grammar is None or self.matcher is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated after the known ones."""
        return self.max_new_tokens - self.num_generated

    @property
    def exhausted(self) -> bool:
        """Whether the tokens that are being drawn are the last ones, whatever they are."""
        return self.num_in_flight > 0 and self.num_in_flight >= self.remaining

    @property
    def capacity(self) -> int:
        """Tokens whose slots this sequence holds."""
        num_own = 0
        for start, stop in self.own:
            num_own += stop - start
        return self.num_shared + num_own


@dataclass(eq=False)
class SequenceGroup:
    """The n sequences of one request and what has become of them."""

    request: Request
    listener: Listener
    sequences: list[Sequence] = field(default_factory=list)
    completions: dict[int, Completion] = field(default_factory=dict)
    done: bool = False

    @classmethod
    def of(cls, submission: Submission) -> SequenceGroup:
        """One sequence over the prompt, followed by all but the last of the tokens to score."""
        request, ids = submission.request, submission.prompt_ids
        assert ids is not None, "a local engine takes token ids"
        if request.score_ids is not None and len(request.score_ids) > 1:
            ids = np.concatenate([ids, np.asarray(request.score_ids[:-1], np.int32)])
        sequence = Sequence(request, ids, grammar=submission.grammar, arrived_s=submission.arrived_s)
        group = cls(request, submission.listener, [sequence])
        sequence.group = group
        return group

    def end(self) -> None:
        """Nothing more becomes of them. They let go of the group, so that no circle keeps what they hold."""
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
        )
        return replace(first, usage=usage, completions=ordered)
