"""API speculative execution: one call fetches tokens beyond the stop, and this surplus answers later texts and gens.

Law: values are those of a program without speculation; where the model samples, they have the same distribution.
That holds as long as the decision to accept depends only on the matched text. Any other rule (asking
until the whole layout fits, asking anew where the answer was too short) biases the values.
Source: SGLang, arXiv 2312.07104, section 5, for the idea.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graftlm.core.config import SamplingParams
from graftlm.core.remote.speculation.live import LiveAnswer
from graftlm.core.remote.transport.answer import Answer, first_stop

CountTokens = Callable[[str], int | None]
"""Number of a text's tokens, by the model's tokenizer; None without one."""


_UNDECIDED = "token limit undecided"
NO_BLANKS = "blanks not written"
"""The reason of a miss: the answer lacks the blanks at the end of the given text."""

FindEnd = Callable[[str], tuple[int, int] | None]
"""A value's end in a text, and the position that proves it; None if the value may continue."""


@dataclass(frozen=True)
class Surplus:
    """An answer and the start of its unused part.

    shape      the sampling parameters of the answer; see `shape_of`.
    at         characters used so far, by values and matched texts.
    first_end  end of the first value, which costs as much without speculation; None before the first value.
    owed       unused characters of the last gen's stop; 1 after an end of turn. A sampled gen that
               begins there would be conditioned on the stop.
    counted    whether this branch counts the tokens; of branches that share a surplus only the first does.
    live       the answer in progress;  max_tokens: the limit of its request.
    """

    answer: Answer
    shape: SamplingParams
    at: int = 0
    first_end: int | None = None
    owed: int = 0
    counted: bool = True
    live: LiveAnswer | None = None
    max_tokens: int = 0

    @property
    def rest(self) -> str:
        return self.answer.text[self.at :]

    @property
    def greedy(self) -> bool:
        return self.shape.greedy

    def surely_taken(self, sampling: SamplingParams) -> bool:
        """Return True if no token limit can force a new request for a value, without token boundaries."""
        return self.answer.token_ends is None and (sampling.max_tokens or 0) >= self.max_tokens

    def grown(self) -> Surplus:
        """Return the surplus with the answer received so far."""
        live = self.live
        return self if live is None else replace(self, live=None if live.complete else live, answer=live.answer)

    def matched(self, text: str) -> tuple[Surplus | None, str | None]:
        """Match a given text; return the surplus after it, None on a mismatch, and the reason of the mismatch."""
        if self.rest.startswith(text):
            at = self.at + len(text)
            return replace(self, at=at, owed=max(0, self.owed - len(text))), None
        if text.startswith(self.rest) and not self.answer.ended:
            return replace(self, at=len(self.answer.text)), None  # the answer is a prefix: used up
        return None, "another text"

    def split_tokens(self) -> tuple[int, int]:
        """Return the tokens used after the first value, and the unused tokens; the rest belongs to the first value.

        Exact where token ends are known, else in proportion to the characters.
        """
        text, ends = self.answer.text, self.answer.token_ends
        first = len(text) if self.first_end is None else self.first_end
        num_tokens = num_answer_tokens(self.answer)
        if ends is not None:
            used = sum(first < end <= self.at for end in ends)
            wasted = sum(end > max(self.at, first) for end in ends)
        else:
            size = max(1, len(text))
            used = num_tokens * max(0, self.at - first) // size
            wasted = num_tokens * max(0, len(text) - max(self.at, first)) // size
        return used, wasted


@dataclass(frozen=True)
class Taken:
    """The part of a surplus that is a gen's value.

    num_left  tokens that may still be generated, if the answer was shorter than the gen's limit.
    """

    value: str
    finish: str
    num_left: int = 0


@dataclass(frozen=True)
class Ahead:
    """The known parts after a gen, up to the end of its turn or of the program.

    num_tokens  upper bound of their tokens.
    generates   whether they include a gen or a select.
    complete    whether nothing else can follow.
    form        their description for an endpoint that cannot continue a turn;  literals: their given texts.
    """

    num_tokens: int = 0
    generates: bool = False
    complete: bool = False
    form: str = ""
    literals: tuple[str, ...] = ()


def shape_of(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters without limits and stops. Texts with equal shapes may share a surplus."""
    return replace(
        sampling, max_tokens=None, stop=(), timeout=None, close_on_length=None, regex=None, choices=None,
        json_schema=None, grammar=None, constraint=None,
    )  # fmt: skip


def may_speculate(sampling: SamplingParams) -> bool:
    """Return True if a gen may use a surplus: no penalties, which depend on the call's output, and n = 1."""
    return (
        sampling.n == 1
        and sampling.max_tokens is not None
        and sampling.min_tokens == 0
        and not (sampling.logprobs or sampling.top_logprobs or sampling.stop_token_ids)
        and sampling.frequency_penalty == sampling.presence_penalty == 0
        and sampling.repetition_penalty == 1
    )


def call_tokens(max_tokens: int, num_spec_tokens: int, ahead: Ahead) -> int:
    """Return the call's token limit: at most the program's known need, since rate limits count requested tokens."""
    wanted = min(num_spec_tokens, max_tokens + ahead.num_tokens) if ahead.complete else num_spec_tokens
    return max(max_tokens, wanted)


def surely_cut(answer: Answer, sampling: SamplingParams) -> bool:
    """Return True if the limit ended an answer without stops, regardless of its finish_reason.

    An end of turn may count as the last token. A greedy model that continues then ends again, which
    is harmless; a sampled one would be more likely to continue.
    """
    if answer.token_ends is not None:
        return len(answer.token_ends) >= (sampling.max_tokens or 0)
    return sampling.greedy and answer.num_tokens is not None and answer.num_tokens >= (sampling.max_tokens or 0)


def decide(
    surplus: Surplus,
    sampling: SamplingParams,
    head: str = "",
    count: CountTokens | None = None,
    ends: FindEnd | None = None,
) -> tuple[Surplus | None, Taken | str | None]:
    """Take a gen's value from a surplus.

    head  blanks at the end of the text that were not sent: the answer must begin with them.
    ends  finds the end of a constrained value, if the endpoint does not enforce the constraint.
    -> the remaining surplus, and the taken value, or the reason of a miss; None if the surplus was used up
    """
    assert sampling.max_tokens is not None
    rest, ended, limit = surplus.rest, surplus.answer.ended, sampling.max_tokens
    if surplus.shape != shape_of(sampling):
        return None, "another sampling"
    if surplus.owed and not surplus.greedy:
        return None, "stop not used up"
    if not rest and not ended:
        return None, None
    if _inside_token(surplus):
        return None, "inside of a token"
    if not rest.startswith(head):
        return None, NO_BLANKS
    at, end = first_stop(rest[len(head) :], sampling.stop)
    left_at = ends(rest[len(head) :]) if ends is not None else None
    if left_at is not None and (not end or left_at[1] < end):
        at, end = left_at
    at, end = at + len(head), end and end + len(head)
    until = end or len(rest)  # a stop must lie within the limit completely
    over = bool(end) or ended  # the model ended there by itself
    num = _num_tokens(surplus, until, count)
    if num is None and over and _at_most(surplus, until) <= limit:
        num = 0
    if num is None or (num > limit and surplus.answer.token_ends is None):
        return None, _UNDECIDED
    if num > limit:  # cut at the gen's own limit
        cut = [e - surplus.at for e in surplus.answer.token_ends or () if e > surplus.at][limit - 1]
        if cut <= len(head):
            return None, _UNDECIDED
        return _after(surplus, cut, 0), Taken(rest[len(head) : cut], "length")
    left = 0 if over else limit - num
    value = rest[len(head) : at]
    owed = end - at if end else int(ended)
    return _after(surplus, at, owed), Taken(value, "stop" if over else "length", left)


def is_final(surplus: Surplus, taken: Taken | str | None, head: str) -> bool:
    """Return True if the rest of a live answer cannot change the decision."""
    if isinstance(taken, Taken):
        return taken.num_left == 0
    return taken not in (None, _UNDECIDED) and not (taken == NO_BLANKS and len(surplus.rest) < len(head))


def take_choice(surplus: Surplus, choices: Sequence[str]) -> tuple[Surplus | None, str | None]:
    """Take a generated choice that is no prefix of a longer one, as greedy token selection does."""
    if not surplus.greedy or _inside_token(surplus):
        return None, None
    found = longest_choice(surplus.rest, choices)
    if found is None or sum(choice.startswith(found) for choice in choices) > 1:
        return None, None
    return _after(surplus, len(found), 0), found


def longest_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the longest choice that is a prefix of the text."""
    return max((choice for choice in choices if text.startswith(choice)), key=len, default=None)


def num_answer_tokens(answer: Answer) -> int:
    """Return the reported number of tokens, else the count of known tokens, else an estimate."""
    if answer.num_tokens is not None:
        return answer.num_tokens
    if answer.token_ends is not None:
        return len(answer.token_ends)
    return -(-len(answer.text.encode()) // 4)


def _after(surplus: Surplus, num_chars: int, owed: int) -> Surplus:
    at = surplus.at + num_chars
    return replace(surplus, at=at, owed=owed, first_end=at if surplus.first_end is None else surplus.first_end)


def _inside_token(surplus: Surplus) -> bool:
    """Return True if a token spans the surplus's start, which is a token boundary in a separate call."""
    ends = surplus.answer.token_ends
    return ends is not None and surplus.at > 0 and surplus.at not in ends


def _num_tokens(surplus: Surplus, until: int, count: CountTokens | None) -> int | None:
    """Return the number of tokens in rest[:until]; None if unknown. Estimated if a new request is impossible."""
    ends = surplus.answer.token_ends
    if ends is not None:
        before = sum(end <= surplus.at for end in ends)
        inside = sum(end < surplus.at + until for end in ends)  # the last token may end beyond `until`
        return inside + 1 - before if until else 0
    if surplus.at == 0 and until == len(surplus.answer.text) and surplus.answer.num_tokens is not None:
        return surplus.answer.num_tokens
    num = count(surplus.rest[:until]) if count is not None else None
    if num is None and surplus.answer.only_turn:  # a new request would start another turn
        num = num_answer_tokens(surplus.answer) * until // max(1, len(surplus.answer.text))
    return num


def _at_most(surplus: Surplus, until: int) -> int:
    """Return an upper bound on the tokens of rest[:until]: at most its bytes, and the answer's tokens."""
    num_bytes = len(surplus.rest[:until].encode())
    return num_bytes if surplus.answer.num_tokens is None else min(num_bytes, surplus.answer.num_tokens)
