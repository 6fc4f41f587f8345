"""Values that a branch of a program requests from an endpoint, one at a time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from graftlm.core.config import SamplingParams
from graftlm.core.errors import RemoteError, RequestTimeout
from graftlm.core.program.expression import Gen, Select
from graftlm.core.program.select import Selection
from graftlm.core.remote.language.checking import Language, checked
from graftlm.core.remote.language.layout import (
    Form,
    after_line,
    after_tail,
    after_text,
    continued,
    hinted,
    placeholder,
    with_blanks,
)
from graftlm.core.remote.language.scoring import score_choices
from graftlm.core.remote.ledger.usage import Count, RemoteUsage
from graftlm.core.remote.speculation.live import Follow, Told
from graftlm.core.remote.speculation.surplus import Ahead
from graftlm.core.remote.speculation.text import RemoteText, Written
from graftlm.core.remote.transport.answer import Answer, until_stop
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.remote.transport.request_body import Query, constraint_in, constraint_kind
from graftlm.core.request import Chunk, Completion, FinishReason

if TYPE_CHECKING:
    from graftlm.core.remote.endpoint import Endpoint

How = Literal["constrained", "generated", "asked"]
LookAhead = Callable[[], Awaitable[Ahead]]


@dataclass(frozen=True)
class Value:
    """The `n` generated values of a gen, with the answer of the first."""

    texts: list[str]
    completion: Completion

    @property
    def text(self) -> str:
        return self.texts[0]


class Values:
    """The requests for the values of one branch. Runs on the loop of endpoints.

    count  receives the costs and savings;  sink  receives each value as a chunk.
    """

    def __init__(self, endpoint: Endpoint, count: Count, sink: Callable[[Chunk], None] | None = None) -> None:
        self._endpoint = endpoint
        self._outer_count = count
        self._sink = sink
        self._spent = RemoteUsage()  # cost of the value in progress
        self._form = _NO_FORM
        self._deadline_s: float | None = None

    def count(self, usage: RemoteUsage) -> None:
        self._spent += usage
        self._outer_count(usage)

    def note(self, usage: RemoteUsage) -> None:
        """Count savings and misses, which no request reports."""
        self._endpoint.note(self.count, usage)

    async def ask(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        *,
        stops: tuple[str, ...],
        tokens: bool = False,
        follow: Follow | None = None,
    ) -> Answer:
        """Return one answer. `tokens` also requests log-probabilities, which give token boundaries, if supported.

        An endpoint that cannot continue a turn is not streamed, since its answer may not have the required form.
        """
        if not tokens:
            return await self._ask(prompt, sampling, stops, follow)

        def ask(logprobs: bool) -> Awaitable[Answer]:
            return self._ask(prompt, replace(sampling, logprobs=logprobs or sampling.logprobs), stops, follow)

        return await self._endpoint.probes.with_logprobs(ask)

    async def _ask(
        self, prompt: RemotePrompt, sampling: SamplingParams, stops: tuple[str, ...], follow: Follow | None
    ) -> Answer:
        open_turn = prompt.messages is not None and (prompt.text != "" or self._form.rest_generates)
        if open_turn and await self._endpoint.probes.continue_turn(self.count) == "none":
            return await self._ask_for_turn(prompt, sampling, stops)
        sent = await self._endpoint.extend(prompt, self.count)
        query = self._query(sent, sampling, stops)
        if follow is None:
            return (await self._endpoint.ask(query))[0]
        async with aclosing(self._endpoint.ask_stream(query)) as pieces:
            async for piece in pieces:
                if piece.answers is not None:
                    return piece.answers[0]
                if piece.so_far is not None and (piece.so_far.token_ends is not None or not sampling.logprobs):
                    follow(piece.so_far)  # with token boundaries, text without them decides nothing
        raise AssertionError("a stream ends with its answers")

    async def _ask_for_turn(self, prompt: RemotePrompt, sampling: SamplingParams, stops: tuple[str, ...]) -> Answer:
        """Return the answer of an endpoint that cannot continue a turn, cut from a whole turn or a continuation."""
        config, form = self._endpoint.config, self._form
        hint = form.first and config.layout_hint
        for num_missed in range(config.max_attempts):
            if hint or not prompt.text:
                sent, num_given = hinted(prompt, form), len(prompt.text.encode())
            else:
                sent, num_given = continued(prompt, form), len(form.tail.encode())
            longer = replace(sampling, max_tokens=(sampling.max_tokens or 0) + num_given) if num_given else sampling
            sent_stops = () if prompt.text else stops  # the given text may contain them
            (found,) = await self._endpoint.ask(self._query(sent, longer, sent_stops))
            rest = after_text(found, prompt.text) if hint else after_tail(found, prompt.text, form)
            last = sampling.greedy and not hint  # a greedy answer would repeat
            if rest is None and (num_missed or last):
                rest = after_line(found, prompt.text, form.tail)  # the instructed answer begins with other words
            if rest is not None:
                return replace(with_blanks(_limited(rest, sampling), prompt.text, form.tail), only_turn=True)
            self.note(RemoteUsage(misses={"layout not followed": 1}))
            if last:
                break
            hint = False
        raise RemoteError(
            f"{_where(form.name)}: the answer of {config.base_url}, which cannot continue a turn, was to begin with "
            f"{form.tail or prompt.text!r} and begins with {found.text[:80]!r}; show the form in an earlier turn, "
            "or end the turn after each gen"
        )

    # -- generating --------------------------------------------------------------------------------------------

    async def gen(self, text: RemoteText, sampling: SamplingParams, look_ahead: LookAhead, part: Gen | None) -> Value:
        """Generate the value of a gen and append it to the text."""
        name = part.name if part is not None else None
        sink, shown = self._sink, ""

        def tell(piece: str) -> None:
            nonlocal shown
            assert sink is not None
            shown += piece
            sink(Chunk(piece, [], name=name))

        with _named(name):
            value = await self._gen(text, sampling, look_ahead, part, None if sink is None else tell)
        if sink is not None:
            for index, one in enumerate(value.completion.completions or [value.completion]):
                left = one.text[len(shown) :] if index == 0 else one.text
                sink(Chunk(left, [], finish_reason=one.finish_reason, usage=one.usage, index=index, name=name))
        return value

    async def _gen(
        self,
        text: RemoteText,
        sampling: SamplingParams,
        look_ahead: LookAhead,
        part: Gen | None,
        tell: Callable[[str], None] | None,
    ) -> Value:
        ahead = await self._begin(text, sampling, look_ahead, part)
        name = self._form.name
        if sampling.n > 1:
            return await self._several(text, sampling, name)
        if not sampling.constrained:
            told = None if tell is None else Told(tell, sampling.stop)
            written = await text.generate(sampling, ahead, told=told)
            text.append(written.text)
            return self._value([written])
        return await self._constrained(text, sampling, ahead, name, tell)

    async def _constrained(
        self,
        text: RemoteText,
        sampling: SamplingParams,
        ahead: Ahead,
        name: str | None,
        tell: Callable[[str], None] | None = None,
        *,
        limited: bool = True,
    ) -> Value:
        """Ask for a value under a constraint.

        limited  a value that `max_tokens` cuts ends there; otherwise it is continued.
        """
        language = await Language.of(sampling)
        told = None if tell is None else Told(tell, sampling.stop, language.follower())
        field = await self._constraint_field(sampling, text.prompt)

        def accept(value: str, stop: str) -> bool:
            """Return True for greedy text in the language: an enforced constraint does not change it."""
            return sampling.greedy and stop != "" and language.begins(value + stop)

        if field is not None:
            written = await text.generate(sampling, ahead, accept, told=told)
        else:
            written = await text.generate(sampling, ahead, ends=language.end, told=told)
        limited = limited and sampling.max_tokens is not None
        return await self._mended(text, written, sampling, language, field, name, limited)

    async def _mended(
        self,
        text: RemoteText,
        written: Written,
        sampling: SamplingParams,
        language: Language,
        field: str | None,
        name: str | None,
        limited: bool,
    ) -> Value:
        """Append the viable prefix of the text, and continue it from there."""
        done = await checked(
            language,
            written.text,
            written.finish_reason,
            lambda begun, complaint: self._more(text, sampling, begun, complaint),
            enforced=field,
            max_attempts=self._endpoint.config.max_attempts,
            where=_where(name),
            limited=limited,
        )
        if done.num_asked or not written.text.startswith(done.text):
            text.drop("constraint not met")
        text.append(done.text, written.text)
        stop = written.stop if done.text == written.text else None
        final = replace(written, text=done.text, finish_reason=done.finish_reason, stop=stop)
        return self._value([final], complete=done.complete)

    async def _more(
        self, text: RemoteText, sampling: SamplingParams, begun: str, complaint: str | None
    ) -> tuple[str, FinishReason] | None:
        """Return a value's continuation, or a new value after a complaint; None if the endpoint supports neither."""
        prompt = text.prompt
        if complaint is None:
            prompt = prompt.plus(begun)
        elif prompt.messages is not None and not prompt.text:
            prompt = prompt.with_turns({"role": "user", "content": complaint})
        elif sampling.greedy:
            return None  # a greedy answer would repeat
        answer = await self.ask(prompt, sampling, stops=sampling.stop)
        return until_stop(answer.text, sampling.stop, answer.finish_reason)

    async def _several(self, text: RemoteText, sampling: SamplingParams, name: str | None) -> Value:
        """Return all `n` values of one request; the text continues with the first."""
        text.drop("another sampling")
        sent = await self._endpoint.extend(text.prompt, self.count)
        if sampling.constrained:
            await self._constraint_field(sampling, sent)
        answers = await self._endpoint.ask(self._query(sent, sampling))
        each = [Written.of(a, sampling.stop) for a in answers]
        if sampling.constrained:
            language = await Language.of(sampling)
            each = [await self._check_one(language, written, sampling, name) for written in each]
        text.append(each[0].text)
        return self._value(each)

    async def _check_one(
        self, language: Language, written: Written, sampling: SamplingParams, name: str | None
    ) -> Written:
        async def none(begun: str, complaint: str | None) -> None:
            """Return None: one of several values is not continued."""

        done = await checked(
            language, written.text, written.finish_reason, none, enforced=None, max_attempts=1, where=_where(name)
        )
        return replace(written, text=done.text, finish_reason=done.finish_reason)

    # -- choosing ----------------------------------------------------------------------------------------------

    async def select(
        self, text: RemoteText, part: Select, sampling: SamplingParams, look_ahead: LookAhead
    ) -> Selection:
        """Choose by the best method that the endpoint supports; `Selection.how` names it."""
        with _named(part.name, "select"):
            return await self._choose(text, part, sampling, look_ahead)

    async def _choose(
        self, text: RemoteText, part: Select, sampling: SamplingParams, look_ahead: LookAhead
    ) -> Selection:
        choices = part.choices
        ahead = await self._begin(text, sampling, look_ahead, part)
        found = await text.take_choice(choices)
        if found is not None:
            text.append(found)
            return self._selection(choices, found, "generated")
        if text.messages is None and await self._endpoint.probes.echo(self.count):
            prompt = text.open_text
            selection = await score_choices(self._endpoint, prompt, choices, part.method, self.count, self._deadline_s)
            text.append(selection.choice)
            return replace(selection, usage=self._spent)
        longest = max(len(choice.encode()) for choice in choices)
        sampling = replace(sampling, choices=choices, max_tokens=longest + _ROOM_FOR_BLANKS)
        field = await self._constraint_field(sampling, text.prompt)
        value = await self._constrained(text, sampling, ahead, part.name, limited=False)
        return self._selection(choices, value.text, "asked" if field is None else "constrained")

    def _selection(self, choices: tuple[str, ...], choice: str, how: How) -> Selection:
        no_ids = np.zeros(0, dtype=np.int32)
        return Selection(choice, choices.index(choice), (), (), (), token_ids=no_ids, usage=self._spent, how=how)

    # -- parts -------------------------------------------------------------------------------------------------

    async def _begin(
        self, text: RemoteText, sampling: SamplingParams, look_ahead: LookAhead, part: Gen | Select | None
    ) -> Ahead:
        """Start the ledger of a value, and look ahead if the call depends on later parts."""
        self._spent = RemoteUsage()
        self._deadline_s = None if sampling.timeout is None else time.monotonic() + sampling.timeout
        known = text.speculates or text.messages is not None
        ahead = await look_ahead() if known else Ahead(complete=True)
        tail = text.text[text.value_end :]
        self._form = Form(
            part.name if part is not None else None,
            text.num_values == 0,
            placeholder(part) if part is not None else "<text>",
            ahead.form,
            tuple(literal for literal in (tail, *ahead.literals) if literal),
            tail,
            text.opening,
            ahead.generates,
        )
        return ahead

    def _query(self, prompt: RemotePrompt, sampling: SamplingParams, stops: tuple[str, ...] | None = None) -> Query:
        return Query(prompt, sampling, self.count, self._deadline_s, stops)

    async def _constraint_field(self, sampling: SamplingParams, prompt: RemotePrompt) -> str | None:
        """Return the field in which the endpoint enforces the constraint; None without such a field."""
        kind = constraint_kind(sampling)
        if kind is None:
            return None
        field = await self._endpoint.probes.constraint(kind, prompt.messages is not None, self.count)
        return field if constraint_in(field, sampling) else None

    def _value(self, written: list[Written], *, complete: bool = True) -> Value:
        each = [
            Completion(
                one.text,
                [],
                one.finish_reason,
                self._spent,
                stop=one.stop,
                text_complete=complete,
                thinking=one.answer.thinking or None,
            )
            for one in written
        ]
        completion = replace(each[0], completions=each) if len(each) > 1 else each[0]
        return Value([one.text for one in each], completion)


async def nothing_ahead() -> Ahead:
    """Return the lookahead of a value without later parts."""
    return Ahead(complete=True)


_ROOM_FOR_BLANKS = 8  # tokens for blanks and line breaks that models write before an unenforced choice
_NO_FORM = Form(None, True, "<text>", "", (), "", "", False)


def _limited(answer: Answer, sampling: SamplingParams) -> Answer:
    """Cut the answer to the caller's token limit, which was raised for given text, if its tokens are known."""
    ends, limit = answer.token_ends, sampling.max_tokens
    if ends is None or limit is None or len(ends) <= limit:
        return answer
    return replace(answer, text=answer.text[: ends[limit - 1]], token_ends=ends[:limit], finish_reason="length")


def _where(name: str | None, kind: str = "gen") -> str:
    return "the answer" if name is None else f"{kind} {name!r}"


@contextmanager
def _named(name: str | None, kind: str = "gen") -> Iterator[None]:
    """Name the value in errors of the endpoint."""
    try:
        yield
    except (RemoteError, RequestTimeout) as error:
        where = _where(name, kind)
        if name is None or str(error).startswith(where):
            raise
        if isinstance(error, RequestTimeout):
            raise RequestTimeout(f"{where}: {error}") from None
        raise type(error)(
            f"{where}: {error}",
            status=error.status,
            code=error.code,
            retry_after_s=error.retry_after_s,
            transient=error.transient,
        ) from None
