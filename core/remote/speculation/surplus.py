"""API speculative execution: one call fetches tokens beyond the stop, and this surplus answers later texts and gens.

Law: values are those of a program without speculation; where the model samples, they have the same distribution.
That holds as long as the decision to accept looks at nothing beyond the text that is matched. Any other rule (asking
until the whole layout fits, asking anew where the answer was too short) favours some values over others.
Source: SGLang, arXiv 2312.07104, section 5, for the idea.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graftlm.core.config import SamplingParams
from graftlm.core.remote.speculation.live import LiveAnswer
from graftlm.core.remote.transport.answer import Answer, first_stop

CountTokens = Callable[[str], int | None]
"""How many tokens a text has, by the model's tokenizer; None if that is not known."""


_UNDECIDED, _NO_BLANKS = "token limit undecided", "blanks not written"

FindEnd = Callable[[str], tuple[int, int] | None]
"""Where a value ends in a text, and where that is known; None if the text does not tell."""


@dataclass(frozen=True)
class Surplus:
    """An answer, and from where on nothing has used it.

    shape      what the answer was drawn with; see `shape_of`.
    at         characters used so far, by values and matched texts.
    first_end  where the first value ended, which would have been paid for anyway; None before there is one.
    owed       characters of the last gen's stop that no text has used; 1 after an end of turn. A sampled gen that
               begins there would be drawn knowing that the stop follows.
    counted    whether its tokens are counted here; a branch that shares it leaves that to the first.
    live       while the answer is still being written;  max_tokens: what it was asked with.
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
        """Whether no limit of tokens can make a value be asked for anew, where tokens are not told."""
        return self.answer.token_ends is None and (sampling.max_tokens or 0) >= self.max_tokens

    def grown(self) -> Surplus:
        """The surplus with the answer as it is by now."""
        live = self.live
        return self if live is None else replace(self, live=None if live.complete else live, answer=live.answer)

    def matched(self, text: str) -> tuple[Surplus | None, str | None]:
        """Match a given text. -> the surplus after it, None if it did not match; and why it did not."""
        if self.rest.startswith(text):
            at = self.at + len(text)
            return replace(self, at=at, owed=max(0, self.owed - len(text))), None
        if text.startswith(self.rest) and not self.answer.ended:
            return replace(self, at=len(self.answer.text)), None  # the call ended inside of the text: all was used
        return None, "another text"

    def split_tokens(self) -> tuple[int, int]:
        """Tokens used after the first value, and tokens that nothing used; what remains belongs to the first value.

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
    """What of a surplus is a gen's value.

    num_left  tokens that may still follow: the answer was shorter than the gen may be.
    """

    value: str
    finish: str
    num_left: int = 0


@dataclass(frozen=True)
class Ahead:
    """What is known to follow a gen before its turn or the program ends.

    num_tokens  at most so many.
    generates   whether a gen or a select is among it.
    complete    whether nothing else can follow.
    form        it, as it is shown to an endpoint that cannot continue a turn;  literals: the given texts of it.
    """

    num_tokens: int = 0
    generates: bool = False
    complete: bool = False
    form: str = ""
    literals: tuple[str, ...] = ()


def shape_of(sampling: SamplingParams) -> SamplingParams:
    """The parameters of a text's distribution, apart from where it ends. Texts with equal ones may share a surplus."""
    return replace(
        sampling, max_tokens=None, stop=(), timeout=None, close_on_length=None, regex=None, choices=None,
        json_schema=None, grammar=None, constraint=None,
    )  # fmt: skip


def may_speculate(sampling: SamplingParams) -> bool:
    """Whether a gen's answer may serve others: penalties count what a call wrote, and n texts have no one rest."""
    return (
        sampling.n == 1
        and sampling.max_tokens is not None
        and sampling.min_tokens == 0
        and not (sampling.logprobs or sampling.top_logprobs or sampling.stop_token_ids)
        and sampling.frequency_penalty == sampling.presence_penalty == 0
        and sampling.repetition_penalty == 1
    )


def call_tokens(max_tokens: int, num_spec_tokens: int, ahead: Ahead) -> int:
    """How long the call may be: no longer than the program is known to need, since limits count what is requested."""
    wanted = min(num_spec_tokens, max_tokens + ahead.num_tokens) if ahead.complete else num_spec_tokens
    return max(max_tokens, wanted)


def surely_cut(answer: Answer, sampling: SamplingParams) -> bool:
    """Whether the limit ended an answer for which no stop was sent, whatever its finish_reason says.

    An end of turn may count as the last token. A greedy model that is asked to go on then ends once more, so that it
    does no harm; drawn again, it would be likelier to go on.
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

    head  blanks at the end of the text that were not sent: the answer has to begin with them.
    ends  where a constraint ends the value, if the endpoint does not enforce it.
    -> the surplus afterwards, and what was taken; or why nothing could be; None if the surplus was just used up
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
        return None, _NO_BLANKS
    at, end = first_stop(rest[len(head) :], sampling.stop)
    left_at = ends(rest[len(head) :]) if ends is not None else None
    if left_at is not None and (not end or left_at[1] < end):
        at, end = left_at
    at, end = at + len(head), end and end + len(head)
    until = end or len(rest)  # a stop counts if all of it is within the limit
    over = bool(end) or ended  # the model stopped there by itself, as it would have
    num = _num_tokens(surplus, until, count)
    if num is None and over and _at_most(surplus, until) <= limit:
        num = 0
    if num is None or (num > limit and surplus.answer.token_ends is None):
        return None, _UNDECIDED
    if num > limit:  # cut where the limit would have cut
        cut = [e - surplus.at for e in surplus.answer.token_ends or () if e > surplus.at][limit - 1]
        if cut <= len(head):
            return None, _UNDECIDED
        return _after(surplus, cut, 0), Taken(rest[len(head) : cut], "length")
    left = 0 if over else limit - num
    value = rest[len(head) : at]
    owed = end - at if end else int(ended)
    return _after(surplus, at, owed), Taken(value, "stop" if over else "length", left)


def is_final(surplus: Surplus, taken: Taken | str | None, head: str) -> bool:
    """Whether more of an answer that is still being written would leave the decision as it is."""
    if isinstance(taken, Taken):
        return taken.num_left == 0
    return taken not in (None, _UNDECIDED) and not (taken == _NO_BLANKS and len(surplus.rest) < len(head))


def take_choice(surplus: Surplus, choices: Sequence[str]) -> tuple[Surplus | None, str | None]:
    """Take a choice that the model wrote, if it can be no longer one; what greedy token selection would choose."""
    if not surplus.greedy or _inside_token(surplus):
        return None, None
    found = longest_choice(surplus.rest, choices)
    if found is None or sum(choice.startswith(found) for choice in choices) > 1:
        return None, None
    return _after(surplus, len(found), 0), found


def longest_choice(text: str, choices: Sequence[str]) -> str | None:
    """The longest of the choices that the text begins with."""
    return max((choice for choice in choices if text.startswith(choice)), key=len, default=None)


def num_answer_tokens(answer: Answer) -> int:
    """As the endpoint says, else as its tokens say, else estimated."""
    if answer.num_tokens is not None:
        return answer.num_tokens
    if answer.token_ends is not None:
        return len(answer.token_ends)
    return -(-len(answer.text.encode()) // 4)


def _after(surplus: Surplus, num_chars: int, owed: int) -> Surplus:
    at = surplus.at + num_chars
    return replace(surplus, at=at, owed=owed, first_end=at if surplus.first_end is None else surplus.first_end)


def _inside_token(surplus: Surplus) -> bool:
    """Whether a token spans where the surplus goes on: a call would not go on so, since its prompt ends there."""
    ends = surplus.answer.token_ends
    return ends is not None and surplus.at > 0 and surplus.at not in ends


def _num_tokens(surplus: Surplus, until: int, count: CountTokens | None) -> int | None:
    """How many tokens rest[:until] has; None if nobody can say. Estimated where no other answer can be had."""
    ends = surplus.answer.token_ends
    if ends is not None:
        before = sum(end <= surplus.at for end in ends)
        inside = sum(end < surplus.at + until for end in ends)  # a token that ends beyond still had to be written
        return inside + 1 - before if until else 0
    if surplus.at == 0 and until == len(surplus.answer.text) and surplus.answer.num_tokens is not None:
        return surplus.answer.num_tokens
    num = count(surplus.rest[:until]) if count is not None else None
    if num is None and surplus.answer.only_turn:  # a value asked for anew would be another turn's
        num = num_answer_tokens(surplus.answer) * until // max(1, len(surplus.answer.text))
    return num


def _at_most(surplus: Surplus, until: int) -> int:
    """A bound on the tokens of rest[:until]: none is shorter than a byte, and a part has no more than the whole."""
    num_bytes = len(surplus.rest[:until].encode())
    return num_bytes if surplus.answer.num_tokens is None else min(num_bytes, surplus.answer.num_tokens)
