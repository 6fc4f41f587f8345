"""Turns of several parts on chat endpoints that cannot continue a turn: one answer must contain the whole turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graftlm.core.program.expression import Gen, Select, Text
from graftlm.core.remote.speculation.surplus import Ahead
from graftlm.core.remote.transport.answer import Answer, cut_before
from graftlm.core.remote.transport.prompt import RemotePrompt

_KINDS = {int: ": an integer", float: ": a number", bool: ": True or False", str: ": text in double quotes"}
_FENCE = "```"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"  # written by models whose server does not remove reasoning


@dataclass(frozen=True)
class Form:
    """The known layout of a turn from its next value on.

    name      of the value;  first: whether it is the first value of the turn.
    value     the placeholder of the value in a hint;  rest: the placeholders and texts after it.
    literals  the given texts of the turn, in order.
    tail      the given text since the last value;  opening: the given text before the first value, if there is one.
    rest_generates  whether another value follows.
    """

    name: str | None
    first: bool
    value: str
    rest: str
    literals: tuple[str, ...]
    tail: str
    opening: str
    rest_generates: bool


def placeholder(part: Gen | Select) -> str:
    """Return the placeholder of a value in a hint."""
    name = part.name or "text"
    if isinstance(part, Select):
        return f"<{name}: one of {', '.join(part.choices)}>"
    choices = part.options.get("choices")
    if choices is not None:
        return f"<{name}: one of {', '.join(choices)}>"
    return f"<{name}{_KINDS.get(part.dtype, '') if part.dtype is not None else ''}>"


def ahead_of(parts: Sequence[Text | Gen | Select], defaults: Mapping[str, Any], *, complete: bool) -> Ahead:
    """Return the lookahead that the parts after a gen determine."""
    num_tokens = 0
    for part in parts:
        match part:
            case Text(text):
                num_tokens += len(text.encode())
            case Gen():
                num_tokens += part.sampling(defaults).max_tokens or 0
            case Select(_, choices):
                num_tokens += max(len(choice.encode()) for choice in choices)
    return Ahead(
        num_tokens,
        any(not isinstance(part, Text) for part in parts),
        complete,
        "".join(part.text if isinstance(part, Text) else placeholder(part) for part in parts),
        tuple(part.text for part in parts if isinstance(part, Text)),
    )


def hinted(prompt: RemotePrompt, form: Form) -> RemotePrompt:
    """Append a hint at the form of the answer to the chat, after all cacheable messages.

    Earlier turns with the same given texts in the same order make it unnecessary.
    """
    messages = list(prompt.messages or ())
    if any(turn.get("role") == "assistant" and _in_order(form.literals, turn.get("content")) for turn in messages):
        return replace(prompt, text="")
    hint = (
        "Reply with exactly this form, nothing before or after it; replace each <...>:\n"
        f"{form.tail}{form.value}{form.rest}"
    )
    last: Mapping[str, Any] = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        messages[-1] = {**last, "content": f"{last['content']}\n\n{hint}"}
    else:
        messages.append({"role": "user", "content": hint})
    return replace(prompt, messages=tuple(messages), text="")


def continued(prompt: RemotePrompt, form: Form) -> RemotePrompt:
    """Append the turn so far to the chat, and the instruction to continue it."""
    begin = f", begin with: {form.tail.strip()}" if form.tail.strip() else ""
    kind = f" {form.value[1:-1]}" if ":" in form.value else ""
    return prompt.with_turns(
        {"role": "assistant", "content": prompt.text},
        {"role": "user", "content": f"Continue exactly where you stopped{begin}{kind and f' (then{kind})'}"},
    )


def after_text(answer: Answer, text: str) -> Answer | None:
    """Return the part after the turn's given beginning in an answer with the whole turn; None if it begins otherwise.

    Blanks, a code fence and reasoning before the turn are skipped.
    """
    bare = text.strip()
    for skipped in _beginnings(answer.text):
        if answer.text.startswith(text, skipped):
            return cut_before(answer, skipped + len(text))
        if answer.text.startswith(bare, skipped) and not text[len(text.rstrip()) :]:
            return cut_before(answer, skipped + len(bare))
    return None


def after_tail(answer: Answer, text: str, form: Form) -> Answer | None:
    """Return the value's text in an answer that begins with the whole turn, with the given text, or with the value.

    None for an answer that restarts the turn and ends before the value.
    """
    whole = after_text(answer, text)
    if whole is not None:
        return whole
    tail = form.tail if text.endswith(form.tail) else form.tail.rstrip()  # unsent blanks are part of the answer
    bare = tail.strip()
    if not bare:
        return cut_before(answer, len(answer.text) - len(answer.text.lstrip()))
    for skipped in _beginnings(answer.text):
        if answer.text.startswith(bare, skipped):
            end = skipped + len(bare)
            blanks = tail[len(tail.rstrip()) :]
            return cut_before(answer, end + len(blanks) if answer.text.startswith(blanks, end) else end)
    opening = form.opening.strip()
    begins = any(answer.text.startswith(opening, skipped) for skipped in _beginnings(answer.text))
    anew = begins and any(map(str.isalnum, opening))
    return None if anew or bare in answer.text else cut_before(answer, len(answer.text) - len(answer.text.lstrip()))


def after_line(answer: Answer, text: str, tail: str) -> Answer | None:
    """Return the part after the given beginning, or after the last given text, on a later line of an answer."""
    for given in (text, tail):
        bare = given.strip()
        at = answer.text.find(f"\n{bare}") + 1 if bare else 0
        if at:
            end = at + len(bare)
            blanks = given[len(given.rstrip()) :]
            return cut_before(answer, end + len(blanks) if answer.text.startswith(blanks, end) else end)
    return None


def with_blanks(answer: Answer, text: str, tail: str) -> Answer:
    """Prepend the blanks that were not sent to an answer that lacks them."""
    blanks = "" if text.endswith(tail) else tail[len(tail.rstrip()) :]
    if answer.text.startswith(blanks):
        return answer
    ends = answer.token_ends
    ends = tuple(end + len(blanks) for end in ends) if ends is not None else None
    return replace(answer, text=blanks + answer.text, token_ends=ends)


def _beginnings(text: str) -> Sequence[int]:
    """Return the positions at which an answer may begin."""
    thoughts, end, said = text.partition(_THOUGHT_END)
    start = len(text) - len((said if end and thoughts.lstrip().startswith(_THOUGHT) else text).lstrip())
    found = [0, start]
    if text.startswith(_FENCE, start) and "\n" in text[start:]:
        found.append(text.index("\n", start) + 1)
    return found


def _in_order(literals: Sequence[str], content: Any) -> bool:
    """Return True if an earlier answer contains all literals in order."""
    position = 0
    for literal in literals:
        position = content.find(literal, position) if isinstance(content, str) else -1
        if position < 0:
            return False
        position += len(literal)
    return bool(literals)
