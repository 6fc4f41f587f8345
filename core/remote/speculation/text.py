"""RemoteText: one growing text of a program at an endpoint, and what an earlier answer holds of its future."""

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
    """Sends a prompt and brings one answer. Without `stops` the answer runs to its end or the limit.

    follow  is given the answer as it is written.
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
"""Runs what reads an answer beside the program, which has not ended before."""


@dataclass(frozen=True)
class Written:
    """A value and how it ended.

    answer  the one it was taken from, as it came.
    stop    the stop string or token id that ended it, where that is known.
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
    """Invariant: `text` is at every step what a program without speculation would have sent.

    messages         the closed turns of a chat; None for plain text.
    start            where in `text` the open turn begins.
    num_spec_tokens  tokens that a call may fetch; None for no speculation.
    count            takes what was saved and wasted.
    num_tokens_of    how many tokens a text has, where the tokenizer is known.
    start            with it, values are taken from a call while it is being answered.
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
        self._given = ""  # given text that waits for an answer that is being written
        self.messages: tuple[Mapping[str, Any], ...] | None = None
        self.start = 0
        self.value_end = 0  # of the last value, or where the turn begins
        self.num_values = 0  # in the turn
        self.opening = ""  # what was given in the turn before its first value
        self.surplus: Surplus | None = None
        self._held = ""  # blanks at the end of the given text: matched when it is known what follows

    @property
    def prompt(self) -> RemotePrompt:
        return RemotePrompt(self.open_text, self.messages)

    @property
    def speculates(self) -> bool:
        return self._num_spec_tokens is not None

    @property
    def pending(self) -> RemoteUsage:
        """What the surplus would be counted as if nothing else used it; nothing before its answer is complete."""
        if self.surplus is None:
            return RemoteUsage()
        surplus = self.surplus.grown()
        return _counted(surplus.matched(self._given)[0] or surplus)

    @property
    def open_text(self) -> str:
        """The text of the open turn; all text of what is no chat."""
        return self.text[self.start :]

    def bind(self, ask: Ask, count: Count, start: Start | None = None) -> None:
        """Ask and count for another branch from now on."""
        self._ask, self._count, self._start = ask, count, start

    def branch(self, *, first: bool) -> RemoteText:
        """The text of a fork. Greedy branches share the surplus; of sampled ones only the first takes it, since
        they must be independent."""
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
        """Begin a turn of the assistant after these; a surplus never crosses a turn."""
        self.end_turn()
        self.messages, self.start = messages, len(self.text)
        self.value_end, self.num_values, self.opening = self.start, 0, ""

    def end_turn(self) -> None:
        self._keep(None, "end of turn")
        self._held = ""

    def _match(self, text: str) -> None:
        """Match given text; in an answer that is being written it waits for the next value."""
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
                self.surplus, after = after, None  # all of it was used
            self._keep(after, why)

    async def _catch_up(self, num_chars: int = 0) -> None:
        """Wait until the answer has what decides about the given text, and so many characters after it."""
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
        """Go on with `after`; where nothing is left, count what became of the surplus, and why if text was wasted."""
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
        """The value of a gen; the caller appends it with `append`.

        accept  whether a value may come from a surplus, by the value and the stop string after it; given where the
                endpoint enforces a constraint, so that its answers begin with no blank. Such a value never fetches a
                surplus: drawn without the constraint it could be of no use, and would be paid twice.
        ends    where a constraint ends a value of a surplus; given where the endpoint does not enforce it.
        told    is told the value while it is written.
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
            # The call was shorter than the gen may be. Keep what came: asking anew would favour short values.
            self._keep(None)
            left = replace(sampling, max_tokens=taken.num_left)
            more = await self._ask(
                self.prompt.plus(taken.value), left, stops=sampling.stop, follow=_follow(told, taken.value)
            )
            # a stop may begin in one answer and end in the next
            return Written.of(replace(more, text=taken.value + more.text), sampling.stop)

    async def take_choice(self, choices: tuple[str, ...]) -> str | None:
        """A choice from the surplus, if one can be taken; without one the surplus is given up."""
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
        """Append a value. `taken` is what `generate` gave, where the value is only the beginning of it."""
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
        """Ask for the value alone."""
        follow = _follow(told, "", head)
        answer = await self._ask(self._without(head), sampling, stops=sampling.stop, follow=follow)
        if not answer.text.startswith(head):
            self._count(RemoteUsage(misses={"blanks not written": 1}))
            head = ""
            answer = await self._ask(self.prompt, sampling, stops=sampling.stop, follow=_follow(told, ""))
        return Written.of(replace(answer, text=answer.text[len(head) :]), sampling.stop)

    def _head(self, sampling: SamplingParams) -> str:
        """Blanks at the end of the given text, which are not sent but expected in the answer.

        A blank mostly is the beginning of the next token, so models go on badly after one, and some APIs refuse it.
        They are sent where a stop string would match them.
        """
        alone = len(self.text) - self.start <= len(self._held)
        return "" if alone or any(stop[0] in _BLANKS for stop in sampling.stop) else self._held

    def _without(self, head: str) -> RemotePrompt:
        prompt = self.prompt
        return replace(prompt, text=prompt.text[: len(prompt.text) - len(head)]) if head else prompt


def _counted(surplus: Surplus) -> RemoteUsage:
    """The bill of a surplus if nothing else uses it."""
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
