"""Language models by rule: the next token is a function of the text, so that any two ways to ask can be compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from zlib import crc32

Model = Callable[[str, float | None], str | None]
"""The next token after a text, None at the end. The number in [0, 1) draws it; None takes the likeliest."""


def tokenise(text: str) -> list[str]:
    """Words, blanks and every other character."""
    return re.findall(r"[A-Za-z]+|[0-9]+| +|.", text, re.DOTALL)


def writes(text: str) -> Model:
    """Always writes one text, whatever stands before: the part of it that is not there yet."""

    def model(prompt: str, _: float | None) -> str | None:
        given = next((n for n in range(len(text), 0, -1) if prompt.endswith(text[:n])), 0)
        rest = tokenise(text[given:])
        return rest[0] if rest else None

    return model


def continues(*documents: str) -> Model:
    """Goes on with the document that the prompt begins; writes nothing after anything else."""

    def model(prompt: str, _: float | None) -> str | None:
        for document in documents:
            if document.startswith(prompt):
                rest = tokenise(document[len(prompt) :])
                return rest[0] if rest else None
        return None

    return model


def answers(rules: Mapping[str, str]) -> Model:
    """Answers a chat whose prompt holds a key (the last that fits) with its text, and goes on with what is begun."""

    def model(prompt: str, _: float | None) -> str | None:
        asked, _mark, begun = prompt.rpartition("<assistant>")
        text = next((text for key, text in reversed(rules.items()) if key in asked), "")
        rest = tokenise(text[len(begun) :]) if text.startswith(begun) else []
        return rest[0] if rest else None

    return model


def babbles(vocabulary: list[str], seed: int, *, end: int = 12, memory: int = 5) -> Model:
    """A text without meaning: each token depends on the last characters, one time in `end` it ends."""

    def model(prompt: str, draw: float | None) -> str | None:
        state = crc32(f"{seed}{prompt[-memory:]}".encode())
        if draw is not None:
            state = crc32(f"{state}{draw}".encode())
        return None if state % end == 0 else vocabulary[state // end % len(vocabulary)]

    return model


def follows_layout(values: Mapping[str, str], preamble: str = "") -> Model:
    """Chats as one that cannot continue a turn: fills in the form it is shown, or goes on where it is told to.

    preamble  is written before a form.
    """

    def answer(prompt: str) -> str:
        asked = prompt.rpartition("<assistant>")[0]
        user = asked.rpartition("<user>")[2]
        if user.startswith("Continue exactly where you stopped, begin with: "):
            begin = re.sub(r" \(then.*\)$", "", user.partition("begin with: ")[2], flags=re.DOTALL)
            form = asked.rpartition("<user>")[0].rpartition("<user>")[2]
            whole = fill(form)
            return whole[whole.index(begin) :]
        return preamble + fill(user)

    def fill(user: str) -> str:
        form = user.partition("replace each <...>:\n")[2] or "".join(f"{k.title()}: {v}\n" for k, v in values.items())
        return re.sub(r"<(\w+)[^>]*>", lambda found: values[found[1]], form)

    def model(prompt: str, _: float | None) -> str | None:
        asked, mark, written = prompt.rpartition("<assistant>")
        whole = answer(asked + mark)
        rest = tokenise(whole[len(written) :]) if whole.startswith(written) else []
        return rest[0] if rest else None

    return model
