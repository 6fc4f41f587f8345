"""Constraints at an endpoint: every answer is checked, and repaired if the endpoint does not enforce the constraint."""

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

_MAX_SHOWN = 300  # characters of a constraint in errors and in prompts

More = Callable[[str, str | None], Awaitable[tuple[str, FinishReason] | None]]
"""Requests the continuation of a value's prefix, or a new value after a complaint about the last one.

-> the text and its finish reason; None if the endpoint cannot provide it.
"""


@dataclass(frozen=True)
class Checked:
    """A value that meets its constraint, or with `complete` False a prefix that the token limit cut.

    num_asked  requests beside the first.
    """

    text: str
    finish_reason: FinishReason
    complete: bool = True
    num_asked: int = 0


class Language:
    """The formal language of a constraint."""

    def __init__(self, grammar: Grammar, shown: str, member_order: Mapping[str, int] | None = None) -> None:
        """Store the grammar; `member_order` ranks the member names of a JSON Schema as the grammar orders them."""
        self._grammar = grammar
        self._member_order = member_order
        self.shown = shown

    @classmethod
    async def of(cls, sampling: SamplingParams) -> Language:
        """Compile a constraint on another thread; raise GrammarError if that fails. JSON may contain blanks."""
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
        """Return the longest prefix of `text` in the language, or None; its longest viable prefix; and the forced
        continuation of that prefix.

        A JSON value in another spelling, or with its members in another order, counts as in the language.
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
        """Return the end, in characters, of the JSON value that begins `text`; None if it is not in the language."""
        if self._member_order is None or (found := respelled(text, self._member_order)) is None:
            return None
        try:
            data = found[0].encode()
        except UnicodeEncodeError:  # a lone surrogate
            return None
        return found[1] if self._follow(data)[0] == len(data) else None

    def may_be_cut(self, text: str) -> bool:
        """Return True if the text is a viable prefix, with any number of blanks in JSON."""
        return self.begins(text) or self._member_order is not None and self.begins(with_single_blanks(text))

    def end(self, text: str) -> tuple[int, int] | None:
        """Find a value's end in `text`, and the number of characters that prove it; None if the value may continue."""
        data = text.encode()
        whole, alive, matcher = self._follow(data)
        if not whole or (alive == len(data) and not matcher.finished):
            return None
        at = len(data[:whole].decode(errors="ignore"))
        return at, at if matcher.finished and whole == alive else len(data[:alive].decode(errors="ignore")) + 1

    def follower(self) -> Callable[[str], int]:
        """Return a counter of the final characters of a growing text, which is cut where it leaves the language."""
        matcher, position, whole, alive = self._grammar.matcher(), 0, 0, True

        def safe(text: str) -> int:
            nonlocal position, whole, alive
            data = text.encode()
            while alive and position < len(data) and not matcher.finished:
                alive = matcher.advance([data[position]]) == 1
                position += alive
                whole = position if matcher.accepting else whole
            sure = whole or position  # characters after a complete value may be cut again
            return len(data[:sure].decode(errors="ignore"))

        return safe

    def _follow(self, data: bytes) -> tuple[int | None, int, Matcher]:
        """Return the lengths in bytes of the longest complete and viable prefixes, and the matcher after the latter."""
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
        """Return True if the text is a viable prefix of the language."""
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
    """Extract a value from an answer: its longest prefix in the language, continued if that is too short.

    limited   whether the caller set the token limit; a value that the endpoint's own limit cut is continued.
    enforced  the field in which the endpoint enforces the constraint; None if it has no such field.
    Raises RemoteError that names the constraint and quotes the answer.
    """
    num_asked = 0
    for num_asked in range(max_attempts):
        whole, alive, forced = language.measure(text)
        if whole is not None and (whole or not text):
            return Checked(whole, finish_reason if whole == text else "stop", num_asked=num_asked)
        stripped = text.lstrip()
        if alive != text != stripped and language.measure(stripped)[1]:
            text = stripped  # models write blanks before a value; they are not part of it
            whole, alive, forced = language.measure(text)
            if whole:
                return Checked(whole, "stop", num_asked=num_asked)
        if finish_reason == "length" and limited and language.may_be_cut(text):
            return Checked(text, "length", complete=False, num_asked=num_asked)
        if whole is not None:
            return Checked(whole, "stop", num_asked=num_asked)  # the empty string
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
    """Describe an answer's violation of its constraint; `alive` is its longest viable prefix."""
    if not alive:
        return f"ignored it: it wrote {text[:80]!r}"
    begin = max(0, len(alive) - 40)
    written = f"{'…' if begin else ''}{text[begin : len(alive) + 40]}"
    return f"did not keep it: it wrote {written!r}, where character {len(alive) + 1} is not allowed,"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


def _shown(sampling: SamplingParams) -> str:
    """Return the constraint in the form in which the user gave it."""
    kind = constraint_kind(sampling)
    if kind is None:
        return repr(sampling.constraint)
    shown = repr(getattr(sampling, kind))
    return f"{kind}={shown if len(shown) <= _MAX_SHOWN else shown[: _MAX_SHOWN - 1] + '…'}"


@cache
def bytes_vocabulary() -> Vocabulary:
    """Return a vocabulary with a token for every byte: checks are independent of the model's tokens."""
    from graftlm.core.grammar.vocabulary import Vocabulary

    return Vocabulary([*(bytes([i]) for i in range(256)), b""], eos_token_id=256)
