"""Probes: detect an endpoint's capabilities from the content of its answers, never from their status.

Servers drop unknown fields without an error, so a capability is proved only by an answer that the model
would not have given without it. A probe takes a few tokens, runs when a capability is first needed, and is counted.
Log-probabilities need no probe: a real call requests them, and its answer has them or not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from graftlm.core.config import SamplingParams
from graftlm.core.errors import RemoteError, RequestTimeout
from graftlm.core.remote.capabilities.capabilities import ConstraintField, ContinueTurn
from graftlm.core.remote.transport.answer import Answer, read_answers
from graftlm.core.remote.transport.prompt import RemotePrompt
from graftlm.core.remote.transport.request_body import Query, constraint_fields

if TYPE_CHECKING:
    from graftlm.core.remote.endpoint import Endpoint
    from graftlm.core.remote.ledger.usage import Count

T = TypeVar("T")

_COUNTING = RemotePrompt("1 2 3 4 5 6 7 8")
_TO_20 = " ".join(map(str, range(1, 21)))
_ASKED_TO_COUNT = RemotePrompt(  # small models cannot count without an example to copy
    "1 2 3 4 5 6 7",
    ({"role": "user", "content": f"Repeat the numbers from 1 to 20: {_TO_20}"},),
)
_BEGUN = replace(_ASKED_TO_COUNT, text=f"So: {_ASKED_TO_COUNT.text}")
_HELLO = ({"role": "user", "content": "Say hello."},)
_GREEDY = SamplingParams(temperature=0, max_tokens=8)
_OBJECT = {  # grammars of some servers allow any whitespace before a scalar, and models then write nothing else
    "type": "object",
    "properties": {"xy": {"const": 7}},
    "required": ["xy"],
    "additionalProperties": False,
}

_PROOFS: Mapping[str, tuple[SamplingParams, Callable[[str], bool]]] = {
    "regex": (replace(_GREEDY, regex="[xy]{3}"), lambda text: re.fullmatch("[xy]{3}", text) is not None),
    "choices": (replace(_GREEDY, choices=("xyx", "yxy")), lambda text: text in ("xyx", "yxy")),
    "grammar": (
        replace(_GREEDY, grammar="root ::= [xy] [xy] [xy]"),
        lambda text: re.fullmatch("[xy]{3}", text) is not None,
    ),
    "json_schema": (replace(_GREEDY, max_tokens=16, json_schema=_OBJECT), lambda text: _begins(text, '{"xy":7')),
}
"""For each kind of constraint a call, and the test whether its answer proves the constraint."""


Refused = Literal["refused", "unsure"]
"""Result of a probe without an answer: "unsure" if the server failed, which may have other reasons."""

_NO: Mapping[Refused, bool | None] = {"refused": False, "unsure": None}


class Probes:
    """The probes of one endpoint; each runs once, and its result is cached."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._locks: dict[str, asyncio.Lock] = {}

    async def continue_turn(self, count: Count) -> ContinueTurn:
        """Detect the way to continue an open turn of the assistant."""

        async def find() -> ContinueTurn | None:
            tokenizer = self._endpoint.tokenizer
            if tokenizer is not None and tokenizer.has_chat_template:
                return "template"
            manners: tuple[ContinueTurn, ...] = ("continue_final_message", "prefix", "bare")
            doubtful = 0
            for manner in manners:
                answer = await self._ask(_ASKED_TO_COUNT, _GREEDY, count, continue_turn=manner)
                doubtful += answer == "unsure"
                if not isinstance(answer, Answer):
                    continue
                counted = re.match(r"(1 2 3 4 5 6 7)?\s*8\b", answer.text)
                if counted is not None and counted[1] is None:
                    return manner
                if counted is not None:  # distinguish a new turn from repeated text: no new turn begins with "So:"
                    answer = await self._ask(_BEGUN, _GREEDY, count, continue_turn=manner)
                    if isinstance(answer, Answer) and answer.text.startswith(_BEGUN.text):
                        self._know(returns_text=True)
                        return manner
            return "none" if doubtful < len(manners) else None

        return await self._once("continue_turn", find) or "none"

    async def with_logprobs(self, ask: Callable[[bool], Awaitable[Answer]]) -> Answer:
        """Return the answer of `ask(True)`, which requests log-probabilities, and so tokens, if they are supported.

        The first such answer decides whether they are: this capability costs no request of its own. A refused
        request is repeated as `ask(False)`.
        """
        known = self._endpoint.capabilities.logprobs
        if known is not None:
            return await ask(known)
        try:
            answer = await ask(True)
        except RequestTimeout:
            raise
        except RemoteError as error:
            if error.status in (None, 401, 408, 429):
                raise
            answer = await ask(False)
            if error.status < 500:  # a server's failure may have other reasons
                self._know(logprobs=False)
            return answer
        if answer.text:
            self._know(logprobs=answer.token_ends is not None or answer.logprobs is not None)
        return answer

    async def echo(self, count: Count) -> bool:
        """Return True if /completions scores a given text."""

        async def find() -> bool | None:
            answer = await self._ask(_COUNTING, replace(_GREEDY, max_tokens=1), count, {"echo": True, "logprobs": 1})
            if not isinstance(answer, Answer):
                return _NO[answer]
            return answer.logprobs is not None and answer.text.startswith(_COUNTING.text)

        return bool(await self._once("echo", find))

    async def returns_text(self, chat: bool, count: Count) -> bool:
        """Return True if answers repeat the given text that they continue; runs once an answer does."""

        async def find() -> bool | None:
            prompt = _BEGUN if chat else _COUNTING
            answer = await self._ask(prompt, _GREEDY, count)
            return answer.text.startswith(prompt.text) if isinstance(answer, Answer) else _NO[answer]

        return bool(await self._once("returns_text", find))

    async def constraint(self, kind: str, chat: bool, count: Count) -> ConstraintField:
        """Return the field that constrains an answer to a regex, choices, a schema or a grammar."""

        async def find() -> ConstraintField | None:
            sampling, proves = _PROOFS[kind]
            prompt = RemotePrompt(messages=_HELLO) if chat else RemotePrompt("Say hello.")
            fields, doubtful = constraint_fields(kind), 0
            for field in fields:
                asked_in: dict[str, Any] = {kind: field}
                answer = await self._ask(prompt, sampling, count, **asked_in)
                blank = isinstance(answer, Answer) and not answer.text.strip()
                doubtful += blank or answer == "unsure"
                if isinstance(answer, Answer) and proves(answer.text):
                    return field
            return "none" if doubtful < len(fields) else None

        return await self._once(kind, find) or "none"

    async def _once(self, name: str, find: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the cached result of a probe, or run it; a probe that failed is repeated later."""
        known: T | None = getattr(self._endpoint.capabilities, name)
        if known is None:
            async with self._locks.setdefault(name, asyncio.Lock()):
                known = getattr(self._endpoint.capabilities, name)
                if known is None and (known := await find()) is not None:
                    self._know(**{name: known})
        return known

    def _know(self, **found: Any) -> None:
        self._endpoint.capabilities = replace(self._endpoint.capabilities, **found)

    async def _ask(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        count: Count,
        extra: Mapping[str, Any] | None = None,
        **known: Any,
    ) -> Answer | Refused:
        """Return the answer to a probe; raise transient errors, so that no wrong result is cached."""
        query = Query(prompt, sampling, count, extra=extra or {})
        try:
            found = await self._endpoint.body(query, probe=True, **known)
            return read_answers(found, self._endpoint.config)[0]
        except RequestTimeout:
            raise
        except RemoteError as error:
            if error.status in (401, 403, 408, 429) or (error.status is None and error.code is None):
                raise
            return "unsure" if error.status is None or error.status >= 500 else "refused"


def _begins(text: str, start: str) -> bool:
    """Return True if a text begins so but for blanks, of which llama.cpp allows many: they may fill the answer."""
    return "".join(text.split()).startswith(start)
