"""Select: choose one of several strings by their likelihood after a prompt."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import numpy as np

from graftlm.core.errors import ConfigError, RequestCancelled
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Completion, Request, Usage

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.text.processor import Processor
    from graftlm.core.text.tokenizer import Tokenizer

Method = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "exact"]
METHODS: tuple[str, ...] = get_args(Method)


T = TypeVar("T")


class Scorer(Protocol):
    """The part of a runtime that `select` uses."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def processor(self) -> Processor: ...
    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]: ...


@dataclass(frozen=True)
class Selection:
    """The chosen text, and figures for every choice in the order given.

    logprobs       natural logarithm of each choice's probability.
    probabilities  the same, normalised to sum to 1.
    scores         the values that the method compared; the choice has the largest.
    token_ids      the prompt followed by the choice, int32 [num_tokens]; empty if the tokenizer is not available.
    how            "scored"; at an endpoint without scores, with empty figures, "constrained" (the endpoint enforced
                   the choices), "generated" (found in an earlier answer) or "asked" (generated freely, then compared).
    """

    choice: str
    index: int
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    scores: tuple[float, ...]
    token_ids: NDArray[np.int32] = field(repr=False, compare=False)
    usage: Usage = Usage()
    how: Literal["scored", "constrained", "generated", "asked"] = "scored"

    @classmethod
    def scored(
        cls, choices: Sequence[str], method: str, conditional: list[list[float]], alone: list[list[float]] | None
    ) -> Selection:
        """Choose by `method` from the log-probabilities of each choice's tokens, after the prompt and alone."""
        scores = decide(method, conditional, alone)
        index = max(range(len(scores)), key=lambda i: scores[i])
        totals = [math.fsum(row) for row in conditional]
        no_ids = np.zeros(0, dtype=np.int32)
        return cls(choices[index], index, tuple(totals), _shares(totals), tuple(scores), token_ids=no_ids)


def select(
    runtime: Scorer, prompt: Any, choices: Sequence[str], *, method: str = "token_length_normalized"
) -> Selection:
    """Choose which of `choices` follows `prompt` (text, token ids or messages). Blocks until the result is ready."""
    choices = check_choices(choices, method)
    return submit_select(runtime, runtime.processor.encode(prompt), choices, method).result()


def check_choices(choices: Sequence[str], method: str) -> tuple[str, ...]:
    """Return the choices as a tuple; raise ConfigError unless they are distinct, non-empty and the method exists."""
    if method not in METHODS:
        raise ConfigError(f"method is {method!r}; known: {', '.join(METHODS)}")
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"choices is {choices!r}; give a list of texts")
    if not choices:
        raise ConfigError("choices is empty; give at least one option")
    if "" in choices:
        raise ConfigError("choices holds an empty text; every option needs at least one character")
    if len(set(choices)) < len(choices):
        raise ConfigError(f"choices has duplicates: {list(choices)!r}")
    return tuple(choices)


def submit_select(runtime: Scorer, prompt: PromptInput, choices: Sequence[str], method: str) -> Future[Selection]:
    """Score all choices after a prompt in one submission; return at once."""
    scoring = Scoring(runtime.tokenizer, prompt, choices, method)
    return gather(runtime.submit_many(scoring.requests), scoring.finish)


class Scoring:
    """The scoring requests of one selection, and its result from their completions."""

    def __init__(self, tokenizer: Tokenizer, prompt: PromptInput, choices: Sequence[str], method: str) -> None:
        self._choices = choices
        self._method = method
        self._options = tokenize_choices(tokenizer, prompt, choices)
        self._trie = ChoiceTrie(self._options.base, self._options.continuations)
        self._bare = self._options.unconditional(tokenizer) if method == "unconditional_likelihood_normalized" else None
        self.requests = self._trie.requests() + (self._bare.requests() if self._bare is not None else [])

    def finish(self, completions: Sequence[Completion]) -> Selection:
        """Make the selection from the completions of `requests`, in order."""
        split = self._trie.num_requests
        unconditional = self._bare.logprobs(completions[split:]) if self._bare is not None else None
        conditional = self._trie.logprobs(completions[:split])
        return self._options.decide(self._choices, self._method, conditional, unconditional, _usage(completions))


# -- choices as tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizedChoices:
    """Choices as token sequences after a common base (token healing).

    base           the prompt, without its last token where a choice merges with it
    continuations  for each choice, the tokens after `base`
    num_prompt     for each choice, the number of these tokens that belong to the prompt (0 or 1)
    """

    base: PromptInput
    continuations: tuple[tuple[int, ...], ...]
    num_prompt: tuple[int, ...]

    def unconditional(self, tokenizer: Tokenizer) -> ChoiceTrie:
        """Return the choices' own tokens without the prompt, after BOS where the tokenizer adds one."""
        bos = np.array([i for i in tokenizer.encode("") if i == tokenizer.bos_token_id], dtype=np.int32)
        own = tuple(ids[n:] for ids, n in zip(self.continuations, self.num_prompt, strict=True))
        return ChoiceTrie(PromptInput(bos), own)

    def decide(
        self,
        choices: Sequence[str],
        method: str,
        conditional: list[list[float]],
        unconditional: list[list[float]] | None,
        usage: Usage,
    ) -> Selection:
        """Make the selection from the log-probabilities of each choice's tokens after `base`."""
        totals = [math.fsum(row) for row in conditional]
        own = [row[n:] for row, n in zip(conditional, self.num_prompt, strict=True)]
        scores = decide(method, own, unconditional) if method != "exact" else totals
        index = max(range(len(scores)), key=lambda i: scores[i])
        token_ids = self.base.extended(self.continuations[index]).ids
        return Selection(
            choices[index], index, tuple(totals), _shares(totals), tuple(scores), token_ids=token_ids, usage=usage
        )


def tokenize_choices(tokenizer: Tokenizer, prompt: PromptInput, choices: Sequence[str]) -> TokenizedChoices:
    """Tokenise each choice together with the prompt's last token.

    "Grade: " + "A" usually tokenises as ":" and " A", not as ": " and "A". If any choice merges with the prompt's
    last token, all choices are scored from before that token, so that the same characters are compared.
    """
    last = int(prompt.ids[-1])
    tail = tokenizer.whole_text(last) if len(prompt) > 1 else None
    if tail is not None:
        joined = [_tokens_of(tokenizer, tail, choice) for choice in choices]
        if any(ids[0] != last for ids in joined):
            healed = prompt.without_last()
            return TokenizedChoices(healed, tuple(joined), tuple(int(ids[0] == last) for ids in joined))
        return TokenizedChoices(prompt, tuple(ids[1:] for ids in joined), (0,) * len(joined))
    alone = tuple(_tokens_of(tokenizer, "", choice) for choice in choices)
    return TokenizedChoices(prompt, alone, (0,) * len(alone))


def _tokens_of(tokenizer: Tokenizer, tail: str, choice: str) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode_continuation(tail + choice))
    if len(ids) <= (ids[:1] == tuple(tokenizer.encode_continuation(tail))):
        raise ConfigError(f"the tokenizer has no token for choice {choice!r}; choose a text that it can write")
    return ids


class ChoiceTrie:
    """A trie of continuations whose nodes are scored once: each request starts where it leaves the previous one.

    With an empty base the first token of a continuation has no context, and its log-probability counts as 0.
    """

    def __init__(self, base: PromptInput, continuations: Sequence[tuple[int, ...]]) -> None:
        self._base = base
        self._continuations = continuations
        self._order = sorted(range(len(continuations)), key=lambda i: continuations[i])
        self._shared = [0] * len(continuations)
        for before, i in zip(self._order, self._order[1:], strict=False):
            self._shared[i] = _common(continuations[before], continuations[i])

    @property
    def num_requests(self) -> int:
        return sum(self._first(i) < len(ids) for i, ids in enumerate(self._continuations))

    def requests(self) -> list[Request]:
        """Return one request per continuation that adds tokens to the trie."""
        found: list[Request] = []
        for i in self._order:
            ids, first = self._continuations[i], self._first(i)
            if first < len(ids):
                found.append(Request(self._base.extended(ids[:first]), score_ids=list(ids[first:])))
        return found

    def logprobs(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Return each continuation's token log-probabilities, in the given order, from the requests' completions."""
        answers = iter(completions)
        rows: list[list[float]] = [[] for _ in self._continuations]
        before: list[float] = []
        for i in self._order:
            ids, first = self._continuations[i], self._first(i)
            row = before[: self._shared[i]]
            if first < len(ids):
                row += [0.0] * (first - len(row))
                row += [t.logprob or 0.0 for t in next(answers).logprobs or []]
            before = rows[i] = row + [0.0] * (len(ids) - len(row))
        return rows

    def _first(self, i: int) -> int:
        """Return the first token of continuation i that is scored by its own request."""
        return self._shared[i] if len(self._base) else max(self._shared[i], 1)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


# -- the methods -------------------------------------------------------------------------------------------------


def decide(method: str, logprobs: list[list[float]], unconditional: list[list[float]] | None = None) -> list[float]:
    """Score each choice from the log-probabilities of its own tokens; the choice with the largest score wins.

    token_length_normalized              mean over the tokens
    greedy_token_selection               token by token, only the choices with the likeliest token remain; a choice
                                         without further tokens competes with its mean. The score is the number of
                                         rounds that a choice remained
    unconditional_likelihood_normalized  mean difference of each token's log-probability with and without the prompt
    exact                                sum over the tokens
    Source: the methods of SGLang's `select`.
    """
    if method == "exact":
        return [math.fsum(row) for row in logprobs]
    if method == "token_length_normalized":
        return [_mean(row) for row in logprobs]
    if method == "greedy_token_selection":
        return _greedy_rounds(logprobs)
    assert unconditional is not None
    return [
        _mean([value - alone for value, alone in zip(row, bare, strict=True)])
        for row, bare in zip(logprobs, unconditional, strict=True)
    ]


def _greedy_rounds(logprobs: list[list[float]]) -> list[float]:
    rounds = [0.0] * len(logprobs)
    alive = list(range(len(logprobs)))
    for column in range(max(len(row) for row in logprobs)):
        values = {i: logprobs[i][column] if column < len(logprobs[i]) else _mean(logprobs[i]) for i in alive}
        best = max(values.values())
        alive = [i for i in alive if values[i] == best]
        for i in alive:
            rounds[i] += 1
        if len(alive) == 1:
            break
    return rounds


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _shares(logprobs: Sequence[float]) -> tuple[float, ...]:
    best = max(logprobs)
    weights = [math.exp(value - best) for value in logprobs]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def _usage(completions: Sequence[Completion]) -> Usage:
    return sum((completion.usage for completion in completions), Usage())


# -- several futures as one --------------------------------------------------------------------------------------


def gather(futures: Sequence[Future[Completion]], finish: Callable[[list[Completion]], T]) -> Future[T]:
    """Return a future of `finish(results)`. Cancelling it cancels all `futures`."""
    outer: Future[T] = Future()
    outer.add_done_callback(partial(_cancel_all, futures))
    remaining = itertools.count(len(futures) - 1, -1)  # one atomic step per callback, on whichever thread

    def arrived(_: Future[Completion]) -> None:
        if next(remaining) == 0 and outer.set_running_or_notify_cancel():
            try:
                outer.set_result(finish([future.result() for future in futures]))
            except CancelledError:
                outer.set_exception(RequestCancelled("one of the requests was cancelled"))
            except BaseException as error:
                outer.set_exception(error)

    for future in futures:
        future.add_done_callback(arrived)
    return outer


def _cancel_all(futures: Sequence[Future[Completion]], outer: Future[T]) -> None:
    if outer.cancelled():
        for future in futures:
            future.cancel()
