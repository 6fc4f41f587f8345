"""Finding out what an endpoint can do: by what its answers contain, never by their status.

Servers drop fields that they do not know without an error, so a capability is proved only by an answer that the model
would not have given without it. A probe takes a few tokens, runs when a capability is first needed, and is counted.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

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
_ASKED_TO_COUNT = RemotePrompt(
    "1 2 3 4 5 6 7",
    ({"role": "user", "content": "Count from 1 to 20, digits separated by single spaces."},),
)
_HELLO = ({"role": "user", "content": "Say hello."},)
_GREEDY = SamplingParams(temperature=0, max_tokens=8)

_PROOFS: Mapping[str, tuple[SamplingParams, Callable[[str], bool]]] = {
    "regex": (replace(_GREEDY, regex="[xy]{3}"), lambda text: re.fullmatch("[xy]{3}", text) is not None),
    "choices": (replace(_GREEDY, choices=("xyx", "yxy")), lambda text: text in ("xyx", "yxy")),
    "grammar": (replace(_GREEDY, grammar="start: /[xy]{3}/"), lambda text: re.fullmatch("[xy]{3}", text) is not None),
    "json_schema": (replace(_GREEDY, json_schema={"const": 7}), lambda text: _is_json(text, 7)),
}
"""For each kind of constraint a call, and whether its answer can only come of it."""


class Probes:
    """Asks each question once, whoever needs the answer."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._locks: dict[str, asyncio.Lock] = {}

    async def continue_turn(self, count: Count) -> ContinueTurn:
        """How an open turn of the assistant is continued."""

        async def find() -> ContinueTurn:
            tokenizer = self._endpoint.tokenizer
            if tokenizer is not None and tokenizer.has_chat_template:
                return "template"
            manners: tuple[ContinueTurn, ...] = ("continue_final_message", "prefix", "bare")
            for manner in manners:
                answer = await self._ask(_ASKED_TO_COUNT, _GREEDY, count, continue_turn=manner)
                if answer is not None and re.match(r"\s*8\b", answer.text):
                    return manner
            return "none"

        return await self._once("continue_turn", find) or "none"

    async def logprobs(self, chat: bool, count: Count) -> bool:
        """Whether log-probabilities come, and with them the tokens."""

        async def find() -> bool | None:
            prompt = replace(_ASKED_TO_COUNT, text="") if chat else _COUNTING
            answer = await self._ask(prompt, replace(_GREEDY, logprobs=True), count)
            return None if answer is None else answer.token_ends is not None

        return bool(await self._once("logprobs", find))

    async def echo(self, count: Count) -> bool:
        """Whether /completions scores a given text."""

        async def find() -> bool | None:
            answer = await self._ask(_COUNTING, replace(_GREEDY, max_tokens=1), count, {"echo": True, "logprobs": 1})
            return None if answer is None else answer.logprobs is not None and answer.text.startswith(_COUNTING.text)

        return bool(await self._once("echo", find))

    async def constraint(self, kind: str, chat: bool, count: Count) -> ConstraintField:
        """The field that constrains an answer to a regex, choices, a schema or a grammar."""

        async def find() -> ConstraintField:
            sampling, proves = _PROOFS[kind]
            prompt = RemotePrompt(messages=_HELLO) if chat else RemotePrompt("Say hello.")
            for field in constraint_fields(kind):
                asked_in: dict[str, Any] = {kind: field}
                answer = await self._ask(prompt, sampling, count, **asked_in)
                if answer is not None and proves(answer.text):
                    return field
            return "none"

        return await self._once(kind, find) or "none"

    async def _once(self, name: str, find: Callable[[], Awaitable[T | None]]) -> T | None:
        """What is known by now, or found out; what could not be found out is asked again later."""
        known: T | None = getattr(self._endpoint.capabilities, name)
        if known is None:
            async with self._locks.setdefault(name, asyncio.Lock()):
                known = getattr(self._endpoint.capabilities, name)
                if known is None and (known := await find()) is not None:
                    found: dict[str, Any] = {name: known}
                    self._endpoint.capabilities = replace(self._endpoint.capabilities, **found)
        return known

    async def _ask(
        self,
        prompt: RemotePrompt,
        sampling: SamplingParams,
        count: Count,
        extra: Mapping[str, Any] | None = None,
        **known: Any,
    ) -> Answer | None:
        """The answer to a probe; None where it is refused. What may pass raises, so that nothing wrong is kept."""
        query = Query(prompt, sampling, count, extra=extra or {})
        try:
            found = await self._endpoint.body(query, probe=True, **known)
            return read_answers(found, self._endpoint.config)[0]
        except RequestTimeout:
            raise
        except RemoteError as error:
            if error.status in (401, 403, 408, 429) or (error.status is None and error.code is None):
                raise
            return None


def _is_json(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False
