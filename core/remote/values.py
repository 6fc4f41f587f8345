"""Values: what a branch of a program asks an endpoint for, one value at a time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from graftlm.core.config import SamplingParams
from graftlm.core.program.select import Selection
from graftlm.core.remote.answer import Answer, first_stop
from graftlm.core.remote.checking import Language, checked
from graftlm.core.remote.prompt import RemotePrompt
from graftlm.core.remote.scoring import score_choices
from graftlm.core.remote.speculation import Ahead
from graftlm.core.remote.text import RemoteText, Written
from graftlm.core.remote.usage import Count, RemoteUsage
from graftlm.core.remote.wire import constraint_kind
from graftlm.core.request import Chunk, Completion, FinishReason

if TYPE_CHECKING:
    from graftlm.core.remote.endpoint import Endpoint

How = Literal["constrained", "generated", "asked"]
LookAhead = Callable[[], Awaitable[Ahead]]


@dataclass(frozen=True)
class Value:
    """A value that was generated, all `n` of them, and what lies behind the first."""

    texts: list[str]
    completion: Completion

    @property
    def text(self) -> str:
        return self.texts[0]


class Values:
    """Asks for the values of one branch. Runs on the loop of endpoints.

    count  takes what is spent;  sink  is given each value as a chunk.
    """

    def __init__(self, endpoint: Endpoint, count: Count, sink: Callable[[Chunk], None] | None = None) -> None:
        self._endpoint = endpoint
        self._outer_count = count
        self._sink = sink
        self._spent = RemoteUsage()  # by the value that is being asked for
        self._deadline_s: float | None = None

    def count(self, usage: RemoteUsage) -> None:
        self._spent += usage
        self._outer_count(usage)

    async def ask(
        self, prompt: RemotePrompt, sampling: SamplingParams, *, stops: tuple[str, ...], tokens: bool = False
    ) -> Answer:
        """One answer. With `tokens` it is asked with what tells where its tokens end, if the endpoint does."""
        sent = await self._endpoint.extend(prompt, self.count)
        if tokens and await self._endpoint.probes.logprobs(sent.messages is not None, self.count):
            sampling = replace(sampling, logprobs=True)
        (answer,) = await self._endpoint.ask(sent, sampling, self.count, self._deadline_s, stops=stops)
        return answer

    # -- generating --------------------------------------------------------------------------------------------

    async def gen(self, text: RemoteText, sampling: SamplingParams, look_ahead: LookAhead, name: str | None) -> Value:
        """The value of a gen; it is appended to the text."""
        value = await self._gen(text, sampling, look_ahead, name)
        if self._sink is not None:
            for index, one in enumerate(value.completion.completions or [value.completion]):
                self._sink(
                    Chunk(one.text, [], finish_reason=one.finish_reason, usage=one.usage, index=index, name=name)
                )
        return value

    async def _gen(self, text: RemoteText, sampling: SamplingParams, look_ahead: LookAhead, name: str | None) -> Value:
        self._begin(sampling)
        if sampling.n > 1:
            return await self._several(text, sampling, name)
        ahead = await look_ahead() if text.speculates else Ahead(complete=True)
        if not sampling.constrained:
            written = await text.generate(sampling, ahead)
            text.append(written.text)
            return self._value([written])
        return await self._constrained(text, sampling, ahead, name)

    async def _constrained(self, text: RemoteText, sampling: SamplingParams, ahead: Ahead, name: str | None) -> Value:
        language = await Language.of(sampling)
        field = await self._constraint_field(sampling, text.prompt)

        def accept(value: str, stop: str) -> bool:
            """An enforced constraint changes what is drawn, but for greedy text that the language has anyway."""
            return sampling.greedy and stop != "" and language.begins(value + stop)

        written = await text.generate(sampling, ahead, accept if field is not None else None)
        return await self._mended(text, written, sampling, language, field, name)

    async def _mended(
        self,
        text: RemoteText,
        written: Written,
        sampling: SamplingParams,
        language: Language,
        field: str | None,
        name: str | None,
    ) -> Value:
        """Append what was written as far as it meets the constraint, gone on with where it does not."""
        done = await checked(
            language,
            written.text,
            written.finish_reason,
            lambda begun, complaint: self._more(text, sampling, begun, complaint),
            enforced=field,
            max_attempts=self._endpoint.config.max_attempts,
            where=_where(name),
        )
        if done.num_asked or not written.text.startswith(done.text):
            text.drop("constraint not met")
        text.append(done.text, written.text)
        final = replace(written, text=done.text, finish_reason=done.finish_reason)
        return self._value([final], complete=done.complete)

    async def _more(
        self, text: RemoteText, sampling: SamplingParams, begun: str, complaint: str | None
    ) -> tuple[str, FinishReason] | None:
        """What follows the beginning of a value; a whole new one after a complaint; None if neither can be had."""
        prompt = text.prompt
        if complaint is None:
            prompt = prompt.plus(begun)
        elif prompt.messages is not None and not prompt.text:
            prompt = prompt.with_turns({"role": "user", "content": complaint})
        elif sampling.greedy:
            return None  # it would write the same again
        answer = await self.ask(prompt, sampling, stops=sampling.stop)
        at, end = first_stop(answer.text, sampling.stop)
        return answer.text[:at], "stop" if end else answer.finish_reason

    async def _several(self, text: RemoteText, sampling: SamplingParams, name: str | None) -> Value:
        """All `n` values of one request; the text goes on with the first."""
        text.drop("another sampling")
        sent = await self._endpoint.extend(text.prompt, self.count)
        if sampling.constrained:
            await self._constraint_field(sampling, sent)
        answers = await self._endpoint.ask(sent, sampling, self.count, self._deadline_s)
        each = []
        for answer in answers:
            at, end = first_stop(answer.text, sampling.stop)
            each.append(Written(answer.text[:at], "stop" if end else answer.finish_reason, answer))
        if sampling.constrained:
            language = await Language.of(sampling)
            each = [await self._check_one(language, written, sampling, name) for written in each]
        text.append(each[0].text)
        return self._value(each)

    async def _check_one(
        self, language: Language, written: Written, sampling: SamplingParams, name: str | None
    ) -> Written:
        async def none(begun: str, complaint: str | None) -> None:
            """One of several is not gone on with."""

        done = await checked(
            language, written.text, written.finish_reason, none, enforced=None, max_attempts=1, where=_where(name)
        )
        return replace(written, text=done.text, finish_reason=done.finish_reason)

    # -- choosing ----------------------------------------------------------------------------------------------

    async def select(
        self,
        text: RemoteText,
        choices: tuple[str, ...],
        method: str,
        sampling: SamplingParams,
        look_ahead: LookAhead,
        name: str | None,
    ) -> Selection:
        """Choose, by the best that the endpoint can do; `Selection.how` says what that was."""
        self._begin(sampling)
        found = text.take_choice(choices)
        if found is not None:
            text.append(found)
            return self._selection(choices, found, "generated")
        sent = await self._endpoint.extend(text.prompt, self.count)
        if sent.messages is None and await self._endpoint.probes.echo(self.count):
            selection = await score_choices(self._endpoint, sent.text, choices, method, self.count, self._deadline_s)
            text.append(selection.choice)
            return replace(selection, usage=self._spent)
        sampling = replace(sampling, choices=choices, max_tokens=max(len(choice.encode()) for choice in choices))
        field = await self._constraint_field(sampling, sent)
        ahead = await look_ahead() if text.speculates and field is None else Ahead(complete=True)
        value = await self._constrained(text, sampling, ahead, name)
        return self._selection(choices, value.text, "asked" if field is None else "constrained")

    def _selection(self, choices: tuple[str, ...], choice: str, how: How) -> Selection:
        no_ids = np.zeros(0, dtype=np.int32)
        return Selection(choice, choices.index(choice), (), (), (), token_ids=no_ids, usage=self._spent, how=how)

    # -- parts -------------------------------------------------------------------------------------------------

    def _begin(self, sampling: SamplingParams) -> None:
        self._spent = RemoteUsage()
        self._deadline_s = None if sampling.timeout is None else time.monotonic() + sampling.timeout

    async def _constraint_field(self, sampling: SamplingParams, prompt: RemotePrompt) -> str | None:
        """The field in which the endpoint takes the constraint; None if it takes it in none."""
        kind = constraint_kind(sampling)
        if kind is None:
            return None
        field = await self._endpoint.probes.constraint(kind, prompt.messages is not None, self.count)
        return None if field == "none" else field

    def _value(self, written: list[Written], *, complete: bool = True) -> Value:
        each = [Completion(one.text, [], one.finish_reason, self._spent, text_complete=complete) for one in written]
        completion = replace(each[0], completions=each) if len(each) > 1 else each[0]
        return Value([one.text for one in each], completion)


def _where(name: str | None) -> str:
    return "a gen without a name" if name is None else f"gen {name!r}"
