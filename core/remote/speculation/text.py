"""RemoteText: one growing text of a program at an endpoint, and what an earlier answer holds of its future."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from graftlm.core.chat.growing_text import GrowingText
from graftlm.core.config import SamplingParams
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.speculation.surplus import (
    Ahead,
    CountTokens,
    FindEnd,
    Surplus,
    call_tokens,
    decide,
    match_text,
    may_speculate,
    shape_of,
    take_choice,
)
from graftlm.core.remote.transport.answer import Answer, first_stop
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.request import FinishReason

_BLANKS = " \t"


class Ask(Protocol):
    """Sends a prompt and brings one answer. Without `stops` the answer runs to its end or the limit."""

    async def __call__(
        self, prompt: RemotePrompt, sampling: SamplingParams, *, stops: tuple[str, ...], tokens: bool = False
    ) -> Answer: ...


@dataclass(frozen=True)
class Written:
    """A value and how it ended. `answer` is the one it was taken from, as it came."""

    text: str
    finish_reason: FinishReason
    answer: Answer


class RemoteText(GrowingText):
    """Invariant: `text` is at every step what a program without speculation would have sent.

    messages         the closed turns of a chat; None for plain text.
    start            where in `text` the open turn begins.
    num_spec_tokens  tokens that a call may fetch; None for no speculation.
    count            takes what was saved and wasted.
    num_tokens_of    how many tokens a text has, where the tokenizer is known.
    """

    def __init__(
        self,
        ask: Ask,
        count: Count,
        num_spec_tokens: int | None = None,
        num_tokens_of: CountTokens | None = None,
    ) -> None:
        super().__init__()
        self._ask = ask
        self._count = count
        self._num_spec_tokens = num_spec_tokens
        self._num_tokens_of = num_tokens_of
        self.messages: tuple[Mapping[str, Any], ...] | None = None
        self.start = 0
        self.value_end = 0  # of the last value, or where the turn begins
        self.num_values = 0  # in the turn
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
        """What the surplus would be counted as if nothing else used it."""
        if self.surplus is None or not self.surplus.counted:
            return RemoteUsage()
        used, wasted = self.surplus.split_tokens()
        return RemoteUsage(spec_tokens_used=used, spec_tokens_wasted=wasted)

    @property
    def open_text(self) -> str:
        """The text of the open turn; all text of what is no chat."""
        return self.text[self.start :]

    def bind(self, ask: Ask, count: Count) -> None:
        """Ask and count for another branch from now on."""
        self._ask, self._count = ask, count

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
        self.value_end, self.num_values = self.start, 0

    def end_turn(self) -> None:
        self._keep(None, "end of turn")
        self._held = ""

    def _match(self, text: str) -> None:
        if text and self.surplus is not None:
            after, why = match_text(self.surplus, text)
            if after is None and why is None:  # the answer ended inside of the text: all of it was used
                self.surplus = replace(self.surplus, at=len(self.surplus.answer.text))
            self._keep(after, why)

    def drop(self, why: str) -> None:
        """Give the surplus up."""
        self._keep(None, why)

    def _keep(self, after: Surplus | None, why: str | None = None) -> None:
        """Go on with `after`; where nothing is left, count what became of the surplus, and why if text was wasted."""
        before = self.surplus
        if after is None and before is not None:
            missed = {why: 1} if why is not None and before.rest else {}
            self._count(replace(self.pending, misses=missed))
        self.surplus = after

    # -- values ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        sampling: SamplingParams,
        ahead: Ahead,
        accept: Callable[[str, str], bool] | None = None,
        ends: FindEnd | None = None,
    ) -> Written:
        """The value of a gen; the caller appends it with `append`.

        accept  whether a value may come from a surplus, by the value and the stop string after it; given where the
                endpoint enforces a constraint, so that its answers begin with no blank.
        ends    where a constraint ends a value of a surplus; given where the endpoint does not enforce it.
        """
        head = "" if accept is not None else self._head(sampling)
        if not head:
            self._match(self._held)
        paid = False
        speculates = (
            self._num_spec_tokens is not None and may_speculate(sampling) and (ahead.generates or not ahead.complete)
        )
        if not may_speculate(sampling):
            self.drop("another sampling")
        while True:
            if self.surplus is None:
                if paid or not speculates:
                    return await self._plain(sampling, head)
                self.surplus = await self._fetch(sampling, ahead, head)
                paid = True
            surplus = self.surplus
            after, taken = decide(surplus, sampling, head, self._num_tokens_of, ends)
            if after is None or taken is None or isinstance(taken, str):
                self._keep(None, taken if isinstance(taken, str) else None)
                continue
            if accept is not None and not accept(taken.value, surplus.answer.text[after.at : after.at + after.owed]):
                self._keep(None, "constraint not met")
                continue
            if taken.num_left == 0:
                self.surplus = after
                if not paid:
                    self._count(RemoteUsage(calls_saved=1))
                return Written(taken.value, _reason(taken.finish), surplus.answer)
            # The call was shorter than the gen may be. Keep what came: asking anew would favour short values.
            self.surplus = after
            self._keep(None)
            left = replace(sampling, max_tokens=taken.num_left)
            more = await self._ask(self.prompt.plus(taken.value), left, stops=sampling.stop)
            text = taken.value + more.text
            at, end = first_stop(text, sampling.stop)  # a stop may begin in one answer and end in the next
            return Written(text[:at], "stop" if end else more.finish_reason, more)

    def take_choice(self, choices: tuple[str, ...]) -> str | None:
        """A choice from the surplus, if one can be taken; without one the surplus is given up."""
        self._match(self._held)
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
        answer = await self._ask(self._without(head), replace(shape, max_tokens=budget), stops=(), tokens=True)
        return Surplus(answer, shape)

    async def _plain(self, sampling: SamplingParams, head: str) -> Written:
        """Ask for the value alone. Some servers leave the stop in the text, so it is always cut here too."""
        answer = await self._ask(self._without(head), sampling, stops=sampling.stop)
        if not answer.text.startswith(head):
            self._count(RemoteUsage(misses={"blanks not written": 1}))
            head = ""
            answer = await self._ask(self.prompt, sampling, stops=sampling.stop)
        text = answer.text[len(head) :]
        at, end = first_stop(text, sampling.stop)
        return Written(text[:at], "stop" if end else answer.finish_reason, answer)

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


def _reason(finish: str) -> FinishReason:
    return "length" if finish == "length" else "stop"
