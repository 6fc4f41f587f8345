"""How a JSON string that is being written can end, by the languages that the strings of a schema have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from graftlm.core.errors import GrammarError
from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.endings import shortest_ending
from graftlm.core.grammar.automata.product import without_products
from graftlm.core.grammar.spec import Limits

_LIMITS = Limits(states=5_000, seconds=0.5)
_MAX_LANGUAGES = 64


class StringEndings:
    """The languages of strings, quotation marks included; their automata are built when they are first needed."""

    def __init__(self, languages: Sequence[Node]) -> None:
        self._languages = [node for node in dict.fromkeys(languages) if _is_string(node)][:_MAX_LANGUAGES]

    def __bool__(self) -> bool:
        return bool(self._languages)

    def of(self, begun: bytes) -> Iterator[bytes]:
        """What may follow `begun`, which begins with a quotation mark, so that a string ends; the shortest first."""
        places = [(dfa, dfa.walk(dfa.start, begun)) for dfa in self._automata]
        endings = {shortest_ending(dfa, place) for dfa, place in places if place is not None}
        yield from sorted(endings, key=len)

    @cached_property
    def _automata(self) -> list[Dfa]:
        found = []
        for node in self._languages:
            try:
                found.append(Dfa.compile(without_products(node), _LIMITS))
            except GrammarError:
                continue  # too large: its strings end as others do, or not at all
        return found


def _is_string(node: Node) -> bool:
    """Whether `node` is a string of several texts: a quotation mark and what is no literal."""
    match node:
        case ast.Concat((ast.Literal(data), *rest)):
            return data[:1] == b'"' and not all(isinstance(item, ast.Literal) for item in rest)
        case _:
            return False


def open_string(text: bytes) -> bytes | None:
    """The string that `text`, the beginning of JSON, ends in, from its quotation mark on; None outside of strings."""
    start, position = -1, 0
    while position < len(text):
        if text[position] == 0x5C and start >= 0:
            position += 1
        elif text[position] == 0x22:
            start = position if start < 0 else -1
        position += 1
    return None if start < 0 else text[start:]
