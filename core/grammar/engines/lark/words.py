"""Words of llguidance's dialect of Lark in a row, and what a row of them is."""

from __future__ import annotations

import json
import re

from graftlm.core.grammar.engines.rules import decoded

ITSELF = "\0"
"""The name of a rule in its own body, until it has one."""
is_rule = re.compile(r"[rs]\d+").fullmatch
is_short = re.compile(r'(?: ?(?:"(?:[^"\\]|\\.)*"|\w+\??)){1,2}').fullmatch
"""Two words or one, which are rather written twice than named."""
CLOSING, OPENING = frozenset('")]'), frozenset('"([')  # after `/` stand flags, after `?` a name has another meaning

_quoted = json.JSONEncoder().encode  # `json.dumps` takes twice as long


def string(data: bytes) -> str:
    """A literal. Raises GrammarError when it is not UTF-8."""
    return _quoted(decoded(data))


def joined(words: list[str]) -> str:
    """`words` in a row, with blanks where one could not be told from the next: each costs as much as a word."""
    text = words[0]
    for word in words[1:]:
        text = text + word if text[-1] in CLOSING or word[0] in OPENING else f"{text} {word}"
    return text


def pair(text: str, word: str) -> str:
    """The same of two, neither of them empty."""
    return text + word if text[-1] in CLOSING or word[0] in OPENING else f"{text} {word}"
