"""Constraints at an endpoint: answers are always checked here, and mended where the endpoint does not enforce them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from graftlm.core.config import SamplingParams
from graftlm.core.constraint import spec_of
from graftlm.core.errors import ConfigError, RemoteError
from graftlm.core.grammar.spec import JsonSchema
from graftlm.core.remote.language.spelling import member_order, respelled, with_single_blanks
from graftlm.core.remote.transport.request_body import constraint_kind
from graftlm.core.request import FinishReason

if TYPE_CHECKING:
    from graftlm.core.grammar.compile import Grammar
    from graftlm.core.grammar.matcher import Matcher
    from graftlm.core.grammar.vocabulary import Vocabulary

_MAX_SHOWN = 300  # characters of a constraint, in errors and in what a model is told

More = Callable[[str, str | None], Awaitable[tuple[str, FinishReason] | None]]
"""Asks for what follows the given beginning of a value, or for a new one, with a complaint about the last.

-> the text and how it ended; None if it cannot be had.
"""


@dataclass(frozen=True)
class Checked:
    """A value that meets its constraint, or with `complete` False the beginning of one that the limit cut.

    num_asked  requests beside the first.
    """

    text: str
    finish_reason: FinishReason
    complete: bool = True
    num_asked: int = 0


class Language:
    """The texts that a constraint allows."""

    def __init__(self, grammar: Grammar, shown: str, member_order: Mapping[str, int] | None = None) -> None:
        """`member_order`, of a JSON Schema: the names of its members in the order in which the grammar writes them."""
        self._grammar = grammar
        self._member_order = member_order
        self.shown = shown

    @classmethod
    async def of(cls, sampling: SamplingParams) -> Language:
        """Compile on another thread; raises GrammarError for what cannot be. JSON may have blanks, as models write."""
        from graftlm.core.grammar.cache import compile_cached

        spec = spec_of(sampling)
        if hasattr(spec, "matcher"):
            raise ConfigError(
                "a constraint over the tokens of a model cannot hold at an endpoint; "
                "give regex=, choices=, json_schema= or grammar="
            )
        options: dict[str, Any] = {} if sampling.json_schema is None else {"whitespace": "flexible"}
        options["on_unsupported"] = sampling.on_unsupported
        grammar = await asyncio.to_thread(compile_cached, spec, bytes_vocabulary(), **options)
        order = member_order(spec.schema) if isinstance(spec, JsonSchema) else None
        return cls(grammar, _shown(sampling), order)

    def measure(self, text: str) -> tuple[str | None, str, str]:
        """-> the longest beginning of `text` that is a whole text of the language, None if there is none; the longest
        one that such a text can begin with; and what has to follow that.

        A JSON value in another spelling, or with its members in another order, is a whole text as well.
        """
        data = text.encode()
        whole, alive, matcher = self._follow(data)
        if whole is None and (end := self._end_of_respelled(text)) is not None:
            return text[:end], text[:end], ""
        forced = b"" if matcher.finished else matcher.forced_bytes()
        return (
            None if whole is None else data[:whole].decode(errors="ignore"),
            data[:alive].decode(errors="ignore"),
            forced.decode(errors="ignore"),
        )

    def _end_of_respelled(self, text: str) -> int | None:
        """The end, in characters, of the JSON value that begins `text`; None if the language has no spelling of it."""
        if self._member_order is None or (found := respelled(text, self._member_order)) is None:
            return None
        try:
            data = found[0].encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return None
        return found[1] if self._follow(data)[0] == len(data) else None

    def may_be_cut(self, text: str) -> bool:
        """Whether a text of the language, with any number of blanks in JSON, can begin so."""
        return self.begins(text) or self._member_order is not None and self.begins(with_single_blanks(text))

    def end(self, text: str) -> tuple[int, int] | None:
        """Find where a value ends in `text`, and after how many characters that is sure; None if it may go on."""
        data = text.encode()
        whole, alive, matcher = self._follow(data)
        if not whole or (alive == len(data) and not matcher.finished):
            return None
        at = len(data[:whole].decode(errors="ignore"))
        return at, at if matcher.finished and whole == alive else len(data[:alive].decode(errors="ignore")) + 1

    def follower(self) -> Callable[[str], int]:
        """How many characters of a growing text are sure to stay, if it is cut where it leaves the language."""
        matcher, position, whole, alive = self._grammar.matcher(), 0, 0, True

        def safe(text: str) -> int:
            nonlocal position, whole, alive
            data = text.encode()
            while alive and position < len(data) and not matcher.finished:
                alive = matcher.advance([data[position]]) == 1
                position += alive
                whole = position if matcher.accepting else whole
            sure = whole or position  # beyond a whole text, what comes may be cut again
            return len(data[:sure].decode(errors="ignore"))

        return safe

    def _follow(self, data: bytes) -> tuple[int | None, int, Matcher]:
        """How many bytes are a whole text of the language, how many can begin one, and the matcher after these."""
        matcher = self._grammar.matcher()
        whole = 0 if matcher.accepting else None
        alive = 0
        for byte in data:
            if matcher.finished or matcher.advance([byte]) != 1:
                break
            alive += 1
            if matcher.accepting:
                whole = alive
        return whole, alive, matcher

    def begins(self, text: str) -> bool:
        """Whether a text of the language can begin so."""
        return self.measure(text)[1] == text


async def checked(
    language: Language,
    text: str,
    finish_reason: FinishReason,
    more: More,
    *,
    enforced: str | None,
    max_attempts: int,
    where: str,
    limited: bool = True,
) -> Checked:
    """Make a value of an answer: its longest prefix that the language allows, continued where that is too short.

    limited   whether the caller set the limit of tokens; a value that the endpoint's own limit cut is continued.
    enforced  the field that the endpoint takes the constraint in; None if it takes none.
    Raises RemoteError that names the constraint and what the model wrote.
    """
    num_asked = 0
    for num_asked in range(max_attempts):
        whole, alive, forced = language.measure(text)
        if whole is not None and (whole or not text):
            return Checked(whole, finish_reason if whole == text else "stop", num_asked=num_asked)
        stripped = text.lstrip()
        if alive != text != stripped and language.measure(stripped)[1]:
            text = stripped  # blanks before a value are the model's habit, not its answer
            whole, alive, forced = language.measure(text)
            if whole:
                return Checked(whole, "stop", num_asked=num_asked)
        if finish_reason == "length" and limited and language.may_be_cut(text):
            return Checked(text, "length", complete=False, num_asked=num_asked)
        if whole is not None:
            return Checked(whole, "stop", num_asked=num_asked)  # the empty text
        if enforced is not None and enforced != "none":
            raise RemoteError(
                f"{where}: the endpoint took {enforced!r} and {_departure(text, alive)} for {language.shown}; "
                "set capabilities of this kind to 'none', and answers are checked and asked again"
            )
        if num_asked + 1 == max_attempts:
            break
        begun = alive + forced
        complaint = None if begun else f"{text[:80]!r} is not of the form {language.shown}. Answer in that form alone."
        answer = await more(begun, complaint)
        if answer is None:
            break
        text, finish_reason = begun + answer[0], answer[1]
    raise RemoteError(
        f"{where}: the model wrote {text[:80]!r}, asked {_times(num_asked + 1)}, which is not of {language.shown}; "
        "show it the form in the prompt, raise max_tokens or max_attempts, or loosen the constraint"
    )


def _departure(text: str, alive: str) -> str:
    """What an answer did instead of keeping its constraint; `alive` is as much of it as the constraint allows."""
    if not alive:
        return f"ignored it: it wrote {text[:80]!r}"
    begin = max(0, len(alive) - 40)
    written = f"{'…' if begin else ''}{text[begin : len(alive) + 40]}"
    return f"did not keep it: it wrote {written!r}, where character {len(alive) + 1} is not allowed,"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


def _shown(sampling: SamplingParams) -> str:
    """The constraint in the form in which the user gave it."""
    kind = constraint_kind(sampling)
    if kind is None:
        return repr(sampling.constraint)
    shown = repr(getattr(sampling, kind))
    return f"{kind}={shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 1] + '…'}"


@cache
def bytes_vocabulary() -> Vocabulary:
    """A vocabulary with a token for every byte, because languages are checked whatever the model's tokens are."""
    from graftlm.core.grammar.vocabulary import Vocabulary

    return Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_token_id=256)
