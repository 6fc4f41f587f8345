"""RemoteText: one growing text of a program at an endpoint, and the surplus of an earlier answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from graftlm.core.chat.growing_text import GrowingText
from graftlm.core.config import SamplingParams
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.speculation.live import Follow, LiveAnswer, Told
from graftlm.core.remote.speculation.surplus import (
    NO_BLANKS,
    Ahead,
    CountTokens,
    FindEnd,
    Surplus,
    Taken,
    call_tokens,
    decide,
    is_final,
    may_speculate,
    shape_of,
    surely_cut,
    take_choice,
)
from graftlm.core.remote.transport.answer import Answer, until_stop
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.request import FinishReason

_BLANKS = " \t"


class Ask(Protocol):
    """A function that sends a prompt and returns one answer. Without `stops` the answer runs to its end or the limit.

    follow  receives the partial answers.
    """

    async def __call__(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        *,
        stops: tuple[str, ...],
        tokens: bool = False,
        follow: Follow | None = None,
    ) -> Answer: ...


Start = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a coroutine in the background; the program ends after it."""


@dataclass(frozen=True)
class Written:
    """A value and its finish reason.

    answer  the unchanged answer that contains it.
    stop    the stop string or token id that ended it, if known.
    """

    text: str
    finish_reason: FinishReason
    answer: Answer
    stop: str | int | None = None

    @classmethod
    def of(cls, answer: Answer, stops: Sequence[str]) -> Written:
        """Return the answer up to its first stop string; some servers leave it in the text."""
        text, reason = until_stop(answer.text, stops, answer.finish_reason)
        return cls(text, reason, answer, answer.stopped_by(stops) if reason == "stop" else None)


class RemoteText(GrowingText):
    """The text of a branch. Invariant: `text` always equals the text of a program without speculation.

    messages         the closed turns of a chat; None for plain text.
    start (attribute)  offset in `text` at which the open turn begins.
    num_spec_tokens  extra tokens of a call; None disables speculation.
    count            receives savings and waste.
    num_tokens_of    counts the tokens of a text, if the tokenizer is available.
    start (argument)   runs background reads; with it values are taken from a live answer.
    """

    def __init__(
        self,
        ask: Ask,
        count: Count,
        num_spec_tokens: int | None = None,
        num_tokens_of: CountTokens | None = None,
        start: Start | None = None,
    ) -> None:
        super().__init__()
        self._ask = ask
        self._count = count
        self._num_spec_tokens = num_spec_tokens
        self._num_tokens_of = num_tokens_of
        self._start = start
        self._given = ""  # given text that waits for a live answer
        self.messages: tuple[Mapping[str, Any], ...] | None = None
        self.start = 0
        self.value_end = 0  # end of the last value, or start of the turn
        self.num_values = 0  # values in the turn
        self.opening = ""  # given text of the turn before its first value
        self.surplus: Surplus | None = None
        self._held = ""  # blanks at the end of the given text, matched together with the next part

    @property
    def prompt(self) -> RemotePrompt:
        return RemotePrompt(self.open_text, self.messages)

    @property
    def speculates(self) -> bool:
        return self._num_spec_tokens is not None

    @property
    def pending(self) -> RemoteUsage:
        """The usage of the surplus if nothing else uses it; empty before its answer is complete."""
        if self.surplus is None:
            return RemoteUsage()
        surplus = self.surplus.grown()
        return _counted(surplus.matched(self._given)[0] or surplus)

    @property
    def open_text(self) -> str:
        """The text of the open turn; without a chat, all text."""
        return self.text[self.start :]

    def bind(self, ask: Ask, count: Count, start: Start | None = None) -> None:
        """Assign the functions of another branch."""
        self._ask, self._count, self._start = ask, count, start

    def branch(self, *, first: bool) -> RemoteText:
        """Return the text of a fork. Greedy branches share the surplus; of sampled branches, which must be independent,
        only the first takes it."""
        child = copy(self)
        if self.surplus is not None:
            takes = first or self.surplus.greedy
            child.surplus = replace(self.surplus, counted=first and self.surplus.counted) if takes else None
        return child

    def write(self, text: str) -> None:
        """Append given text."""
        self.text += text
        given = self._held + text
        bare = given.rstrip(_BLANKS)
        self._held = given[len(bare) :]
        self._match(bare)

    def begin_turn(self, messages: tuple[Mapping[str, Any], ...] | None) -> None:
        """Begin a turn of the assistant after `messages`; a surplus never crosses a turn."""
        self.end_turn()
        self.messages, self.start = messages, len(self.text)
        self.value_end, self.num_values, self.opening = self.start, 0, ""

    def end_turn(self) -> None:
        self._keep(None, "end of turn")
        self._held = ""

    def _match(self, text: str) -> None:
        """Match given text; with a live answer the match waits for the next value."""
        self._given += text
        if self.surplus is not None and self.surplus.live is not None:
            self.surplus = self.surplus.grown()
        if self.surplus is None or self.surplus.live is None:
            self._match_given()

    def _match_given(self) -> None:
        given, self._given = self._given, ""
        if given and self.surplus is not None:
            after, why = self.surplus.matched(given)
            if after is not None and not after.rest and not after.answer.ended and after.live is None:
                self.surplus, after = after, None  # used up
            self._keep(after, why)

    async def _catch_up(self, num_chars: int = 0) -> None:
        """Wait until the answer decides the match of the given text, with `num_chars` characters after it."""
        while self.surplus is not None:
            self.surplus = self.surplus.grown()
            rest, live = self.surplus.rest, self.surplus.live
            needed = len(self._given) + num_chars
            if (
                live is None
                or len(rest) >= needed
                or not (rest.startswith(self._given) or self._given.startswith(rest))
            ):
                break
            await live.grow()
        self._match_given()

    def drop(self, why: str) -> None:
        """Drop the surplus."""
        self._keep(None, why)

    def _keep(self, after: Surplus | None, why: str | None = None) -> None:
        """Continue with `after`; if it is None, count the use of the surplus, and the reason `why` of waste."""
        before, self.surplus = self.surplus, after
        if after is not None or before is None:
            return
        before, given, self._given = before.grown(), self._given, ""
        count = self._count

        def settle(answer: Answer) -> None:
            done = replace(before, answer=answer, live=None)
            done, missed = done.matched(given)[0] or done, {why: 1} if why is not None else {}
            count(replace(_counted(done), misses=missed if done.rest else {}))

        if before.live is not None:
            before.live.then(settle)
        else:
            settle(before.answer)

    # -- values ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        sampling: SamplingParams,
        ahead: Ahead,
        accept: Callable[[str, str], bool] | None = None,
        ends: FindEnd | None = None,
        told: Told | None = None,
    ) -> Written:
        """Generate the value of a gen; the caller appends it with `append`.

        accept  returns whether a surplus value is valid, from the value and the stop string after it; set if the
                endpoint enforces a constraint, so that its answers begin without blanks. Such a value never fetches a
                surplus: unconstrained tokens may be invalid, and would be billed twice.
        ends    finds the end of a constrained value in a surplus; set if the endpoint does not enforce it.
        told    streams the value while it is received.
        """
        head = "" if accept is not None else self._head(sampling)
        if not head:
            self._match(self._held)
        await self._catch_up()
        paid = False
        speculates = (
            self._num_spec_tokens is not None and may_speculate(sampling) and (ahead.generates or not ahead.complete)
            and accept is None
        )  # fmt: skip
        if not may_speculate(sampling):
            self.drop("another sampling")
        while True:
            if self.surplus is None:
                if paid or not speculates:
                    return await self._plain(sampling, head, told)
                self.surplus = await self._fetch(sampling, ahead, head)
                paid = True
            surplus = self.surplus = self.surplus.grown()
            after, taken = decide(surplus, sampling, head, self._num_tokens_of, ends)
            if surplus.live is not None and not is_final(surplus, taken, head):
                sure = isinstance(taken, Taken) or surplus.surely_taken(sampling)
                if told is not None and sure and accept is None and surplus.rest.startswith(head):
                    told.grow(surplus.rest[len(head) :])
                await surplus.live.grow()
                continue
            if after is None or taken is None or isinstance(taken, str):
                self._keep(None, taken if isinstance(taken, str) else None)
                if taken == NO_BLANKS and paid:
                    head = ""  # a second request without the blanks would miss them again
                continue
            if accept is not None and not accept(taken.value, surplus.answer.text[after.at : after.at + after.owed]):
                self._keep(None, "constraint not met")
                continue
            self.surplus = after
            if taken.num_left == 0:
                if not paid:
                    self._count(RemoteUsage(calls_saved=1))
                owed = surplus.answer.text[after.at : after.at + after.owed]
                stop = owed if owed in sampling.stop else None
                return Written(taken.value, _reason(taken.finish), surplus.answer, stop)
            # The call was shorter than the gen's limit. Keep the answer: a new request would favour short values.
            self._keep(None)
            left = replace(sampling, max_tokens=taken.num_left)
            more = await self._ask(
                self.prompt.plus(taken.value), left, stops=sampling.stop, follow=_follow(told, taken.value)
            )
            # a stop may span two answers
            return Written.of(replace(more, text=taken.value + more.text), sampling.stop)

    async def take_choice(self, choices: tuple[str, ...]) -> str | None:
        """Return a choice from the surplus, or None; without a choice the surplus is dropped."""
        self._match(self._held)
        await self._catch_up(max(map(len, choices)))
        if self.surplus is None:
            return None
        after, found = take_choice(self.surplus, choices)
        if found is None:
            self._keep(None, "no choice")
            return None
        self.surplus = after
        self._count(RemoteUsage(calls_saved=1))
        return found

    def append(self, value: str, taken: str | None = None) -> None:
        """Append a value. `taken` is the result of `generate`, if the value is only a prefix of it."""
        if self.num_values == 0:
            self.opening = self.open_text
        self.text += value
        self.value_end, self.num_values = len(self.text), self.num_values + 1
        self._held = ""
        if taken is not None and self.surplus is not None and len(value) < len(taken):
            back = len(taken) - len(value)
            self.surplus = replace(self.surplus, at=self.surplus.at - back, owed=self.surplus.owed + back)

    async def _fetch(self, sampling: SamplingParams, ahead: Ahead, head: str) -> Surplus:
        assert sampling.max_tokens is not None and self._num_spec_tokens is not None
        budget = call_tokens(sampling.max_tokens, self._num_spec_tokens, ahead)
        shape = shape_of(sampling)
        longer, prompt, ask = replace(shape, max_tokens=budget), self._without(head), self._ask

        async def asked(follow: Follow | None = None) -> Answer:
            answer = await ask(prompt, longer, stops=(), tokens=True, follow=follow)
            return replace(answer, finish_reason="length") if surely_cut(answer, longer) else answer

        if self._start is None:
            return Surplus(await asked(), shape)
        live = LiveAnswer()
        self._start(live.read(asked))
        return Surplus(live.answer, shape, live=live, max_tokens=budget)

    async def _plain(self, sampling: SamplingParams, head: str, told: Told | None) -> Written:
        """Request the value without a surplus."""
        follow = _follow(told, "", head)
        answer = await self._ask(self._without(head), sampling, stops=sampling.stop, follow=follow)
        if not answer.text.startswith(head):
            self._count(RemoteUsage(misses={"blanks not written": 1}))
            head = ""
            answer = await self._ask(self.prompt, sampling, stops=sampling.stop, follow=_follow(told, ""))
        return Written.of(replace(answer, text=answer.text[len(head) :]), sampling.stop)

    def _head(self, sampling: SamplingParams) -> str:
        """Return the blanks at the end of the given text, which are not sent but expected in the answer.

        A blank usually belongs to the next token, so models continue badly after one, and some APIs refuse it.
        They are sent if a stop string would match them.
        """
        alone = len(self.text) - self.start <= len(self._held)
        return "" if alone or any(stop[0] in _BLANKS for stop in sampling.stop) else self._held

    def _without(self, head: str) -> RemotePrompt:
        prompt = self.prompt
        return replace(prompt, text=prompt.text[: len(prompt.text) - len(head)]) if head else prompt


def _counted(surplus: Surplus) -> RemoteUsage:
    """Return the usage of a surplus if nothing else uses it."""
    if not surplus.counted or surplus.live is not None:
        return RemoteUsage()
    used, wasted = surplus.split_tokens()
    return RemoteUsage(spec_tokens_used=used, spec_tokens_wasted=wasted)


def _follow(told: Told | None, before: str, head: str = "") -> Follow | None:
    """Report a value that begins with `before` and continues with an answer, which has `head` before it."""
    if told is None:
        return None

    def follow(answer: Answer) -> None:
        if answer.text.startswith(head):
            told.grow(before + answer.text[len(head) :])

    return follow


def _reason(finish: str) -> FinishReason:
    return "length" if finish == "length" else "stop"
