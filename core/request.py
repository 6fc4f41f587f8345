"""Requests and results: Request, Listener, Chunk, Completion, Usage, Score."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError, GraftError, failure_of
from graftlm.core.prompt_input import PromptInput
from graftlm.core.serving import telemetry

if TYPE_CHECKING:
    from concurrent.futures import Future

    from graftlm.core.chat.thinking import Thinking
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.metrics import PrefixMiss

FinishReason = Literal["stop", "length", "cancelled", "tool_calls"]

_request_ids = itertools.count(1)
_submission_ids = itertools.count(1)


@dataclass(frozen=True)
class Usage:
    """Token counts of one request. `forced_tokens` and `reasoning_tokens` are parts of `completion_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.forced_tokens + other.forced_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True)
class Timing:
    """Where the time of one request went, in seconds: waiting, computing its prompt, writing its other tokens."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class OpenRequest:
    """A request that waits or runs. `cached_tokens` is None until it has started."""

    id: int
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    age_s: float


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token and its log-probability.

    token      the text; bytes that are no whole character show as U+FFFD
    logprob    natural log; None where the grammar forced the token
    top        (token id, text, log-probability) of the likeliest tokens
    data       the bytes of the token, which `token` cannot show where it is part of a character
    top_data   the bytes of each entry of `top`
    """

    token_id: int
    token: str
    logprob: float | None
    top: tuple[tuple[int, str, float], ...] = ()
    data: bytes | None = None
    top_data: tuple[bytes, ...] | None = None

    def __post_init__(self) -> None:
        if self.data is None:
            object.__setattr__(self, "data", self.token.encode())
        if self.top_data is None:
            object.__setattr__(self, "top_data", tuple(text.encode() for _, text, _ in self.top))

    @property
    def candidates(self) -> list[Candidate]:
        """Return the token itself, then the entries of `top`; a forced token has log-probability 0."""
        assert self.data is not None and self.top_data is not None
        top = (Candidate(*one, data) for one, data in zip(self.top, self.top_data, strict=True))
        return [Candidate(self.token_id, self.token, self.logprob or 0.0, self.data), *top]

    def to_openai(self) -> dict[str, Any]:
        """Return an entry of `logprobs.content` in the form of the OpenAI API."""
        itself, *top = (
            {"token": one.token, "bytes": list(one.data), "logprob": one.logprob} for one in self.candidates
        )
        return {**itself, "top_logprobs": top}


class Candidate(NamedTuple):
    """A token at one position, its text, log-probability (natural log) and bytes."""

    token_id: int
    token: str
    logprob: float
    data: bytes


@dataclass(frozen=True)
class Completion:
    """The answer to one request. With n > 1, `completions` holds all n and the rest is the first of them."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    completions: list[Completion] = field(default_factory=list)
    request_id: int = 0
    stop: str | int | None = None
    """The stop string or token id that ended the text, if one did."""
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    """The tool calls that an endpoint reported, in the form of the OpenAI API, their arguments as they came; None for
    a model in this process, which writes calls in its text."""
    thinking: str | None = None
    """The thinking that an endpoint reported beside the text; None for a model in this process, whose text has it."""
    text_complete: bool = True
    """False when `max_tokens` cut the text inside its constraint."""
    checked: bool = False
    """Whether jsonschema judged the text, whose schema the mask does not keep whole (`on_unsupported="check"`)."""
    miss: PrefixMiss | None = field(default=None, repr=False)
    """Where the prompt left the cache; `Runtime.explain` reads it."""
    logits: np.ndarray | None = field(default=None, repr=False, compare=False)
    """float32 [vocab_size] after the last prompt token, for a request that wants them."""
    pin: int | None = field(default=None, repr=False)
    """What `Engine.unpin` takes, for a request whose prefix stays in the cache."""
    timing: Timing | None = field(default=None, repr=False, compare=False)
    cached_from: str | None = None
    """The earlier text that this is the answer to, from a `SemanticCache`; None where the model answered."""
    similarity: float | None = None
    """Cosine of the embeddings of that text and this prompt's."""

    def _repr_html_(self) -> str:
        """Return the answers and their counts, as notebooks show them."""
        from graftlm.core.text.html import block, table

        shown = [("thinking", self.thinking)] if self.thinking else []
        answers = self.completions or [self]
        shown += [(f"answer {i + 1}" if len(answers) > 1 else "answer", one.text) for i, one in enumerate(answers)]
        usage = self.usage
        counts = {"ended by": self.finish_reason, "prompt tokens": usage.prompt_tokens, "cached": usage.cached_tokens}
        counts |= {"generated": usage.completion_tokens, "forced": usage.forced_tokens}
        return "".join(block(title, text) for title, text in shown) + table(counts)


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: whole characters only. The last one has `finish_reason` and `usage`, each one
    `usage` where the request asks for it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    name: str | None = None
    tool_calls: tuple[Mapping[str, Any], ...] | None = None
    """As in `Completion`, with the last chunk; () in the chunks before it."""
    thinking: str | None = None
    """A piece of the thinking that an endpoint reports beside the text; None for a model in this process."""


@dataclass(eq=False)
class Begun:
    """The delivered part of an answer whose engine has died: another engine continues it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk that is delivered."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()
        self.finish_reason = chunk.finish_reason


@dataclass(frozen=True)
class Score:
    """Log-probabilities (natural log) of given tokens."""

    token_ids: list[int]
    logprobs: list[float]
    usage: Usage = Usage()


class Listener(Protocol):
    """Receives the events of one request. It is called on the engine's thread and must not block."""

    def on_chunk(self, chunk: Chunk) -> None: ...
    def on_finish(self, completion: Completion) -> None: ...
    def on_error(self, error: BaseException) -> None: ...


class EndListener:
    """A listener that also reports the end of its request."""

    def __init__(self, listener: Listener, ended: Callable[[], None]) -> None:
        self._listener = listener
        self._ended = ended

    def on_chunk(self, chunk: Chunk) -> None:
        self._listener.on_chunk(chunk)

    def on_finish(self, completion: Completion) -> None:
        self._ended()
        self._listener.on_finish(completion)

    def on_error(self, error: BaseException) -> None:
        self._ended()
        self._listener.on_error(error)


@dataclass(eq=False)
class Request:
    """One call: a prompt and how to decode it.

    prompt     text taken as is, token ids, messages (rendered once with the chat template), or a PromptInput.
    namespace  requests of different namespaces never share KV.
    priority   of the requests of callers that hold as much of the batch, those with the lowest number start first.
    owner      the caller and the call that it belongs to, which share the engine fairly with others.
    score_ids  tokens to score after the prompt instead of generating; None generates.
    stream     whether the listener wants chunks;  stream_usage: with the tokens counted so far in each.
    on_chunk   is given each chunk of a request with `stream` that is submitted for a future; on the engine's thread,
               must not block.
    want_logits  return the logits after the prompt instead of generating.
    pin        keep the prompt's KV from eviction afterwards, until `Engine.unpin(completion.pin)`.
    tools      functions that the model may call, in the form of the OpenAI API;  tool_fields: what an endpoint is told
               beside them, such as tool_choice.
    thinking   how the model writes its thinking: a constraint begins behind it. None: at the first token.
    thinking_budget  limit of thinking tokens; the end marker is then forced. None for no limit.
    begun      the delivered part of each of the n answers, which the engine continues; () for a new request.
    span_context  the context of the OpenTelemetry span in which the request was built; None without one.
    num_prompt_tokens  tokens of the encoded prompt; None before it is encoded, and where an endpoint encodes it.
    """

    prompt: Any
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    owner: tuple[str, str] = ("", "")
    priority: int = 0
    score_ids: list[int] | None = None
    stream: bool = False
    stream_usage: bool = False
    on_chunk: Callable[[Chunk], None] | None = None
    want_logits: bool = False
    pin: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_fields: dict[str, Any] = field(default_factory=dict)
    thinking: Thinking | None = None
    thinking_budget: int | None = None
    begun: tuple[Begun, ...] = ()
    span_context: Any = field(default_factory=telemetry.current_span, repr=False)
    num_prompt_tokens: int | None = field(default=None, init=False)
    id: int = field(default_factory=lambda: next(_request_ids))

    @property
    def markers(self) -> frozenset[str]:
        """The names of special tokens that the text shows, because its thinking or its calls are read off them."""
        special = () if self.thinking is None else self.thinking.special
        return frozenset((*special, *getattr(self.sampling.constraint, "markers", ())))


@dataclass(eq=False)
class Submission:
    """A request on its way into an engine, with the prompt and grammar that the caller's thread has prepared.

    prompt   the rendered prompt, without score_ids; None for an engine that takes prompts as they are given.
    grammar  the compiled constraint, or its compilation in progress; None for free text, and for an engine that
             takes constraints as they are given.
    """

    request: Request
    listener: Listener
    prompt: PromptInput | None = None
    grammar: Future[Grammar] | None = None
    arrived_s: float = field(default_factory=time.monotonic)
    id: int = field(default_factory=lambda: next(_submission_ids))
    """The argument of `Engine.cancel`. A request that is submitted twice has two ids."""

    def __post_init__(self) -> None:
        if self.prompt is not None:
            self.request.num_prompt_tokens = len(self.prompt.ids)

    def constraint_error(self, deadline_s: float) -> GraftError | None:
        """Wait for the compilation of the constraint until `deadline_s` of time.monotonic; return its error, if any."""
        if self.grammar is None:
            return None
        try:
            error = self.grammar.exception(timeout=max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            return None
        return None if error is None else failure_of(error)

    @property
    def prompt_ids(self) -> np.ndarray | None:
        """The ids of the rendered prompt, int32 [num_prompt_tokens]."""
        return None if self.prompt is None else self.prompt.ids


def checked(request: Request) -> Request:
    """Return the request; raise ConfigError for an object that is none."""
    if not isinstance(request, Request):
        raise ConfigError(f"submit takes a Request, not {type(request).__name__}; build gl.Request(prompt, ...)")
    return request


def is_batch(prompt: Any) -> bool:
    """Whether a list holds prompts rather than being one (token ids or messages)."""
    if isinstance(prompt, str | Mapping | np.ndarray) or not isinstance(prompt, Sequence):
        return False
    if not prompt:
        raise ConfigError("the list of prompts is empty; give at least one")
    first = prompt[0]
    if isinstance(first, str | PromptInput):
        return True
    return isinstance(first, Sequence | np.ndarray) and not isinstance(first, Mapping)
