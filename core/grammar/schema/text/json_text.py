"""The spelling of JSON: strings and names as nodes.

A character has one spelling: itself, but for the quotation mark, the backslash and the controls below U+0020, which
take their short escape or else `\\u00xx`. Free text may also write `/` as `\\/`. Lone surrogates have no spelling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node, Range

_encode = json.JSONEncoder(ensure_ascii=False).encode
QUOTE = nodes.literal('"')
RAW: tuple[Range, ...] = ((0x20, 0x21), (0x23, 0x5B), (0x5D, nodes.MAX_CODE_POINT))
_RAW_BYTES = (*RAW[:2], (0x5D, 0xFF))
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in (*range(0x20), 0x22, 0x5C)}


def spelling(ranges: Iterable[Range]) -> Node:
    """One character of `ranges` as it is written inside a JSON string."""
    return _spelling(nodes.normalise(ranges))


@lru_cache(maxsize=4096)
def _spelling(wanted: tuple[Range, ...]) -> Node:
    escaped = [text for code, text in _ESCAPES.items() if any(low <= code <= high for low, high in wanted)]
    return nodes.alternation(nodes.char_set(nodes.intersect(wanted, RAW)), _one_of(escaped))


def _one_of(texts: list[str]) -> Node:
    """One of these, written with what they share: patterns repeat it, and all that reads them takes each word anew."""
    if len(texts) < 2:
        return nodes.alternation(*map(nodes.literal, texts))
    shared = commonprefix(texts)
    if shared:
        return nodes.concat(nodes.literal(shared), _one_of([text[len(shared) :] for text in texts]))
    letters = "".join(text for text in texts if len(text) == 1)
    longer = groupby(sorted(text for text in texts if len(text) > 1), key=itemgetter(0))
    return nodes.alternation(nodes.chars(letters), *(_one_of(list(group)) for _, group in longer))


def _text_char() -> Node:
    hexadecimal = nodes.chars("0123456789abcdefABCDEF")
    short = nodes.concat(nodes.literal("\\"), nodes.chars('"\\/bfnrt'))
    control = nodes.concat(nodes.literal("\\u00"), nodes.chars("01"), hexadecimal)
    return nodes.alternation(nodes.char_set(RAW), short, control)


TEXT_CHAR = _text_char()
"""One character of free text."""

NAME_CHAR = spelling(nodes.ANY_CHAR.ranges)
"""One character of a member's name, or of text that a pattern describes: exactly one spelling each."""


def spell(node: Node) -> Node:
    """`node`, a language of plain text, as it is written inside a JSON string."""
    match node:
        case nodes.Literal(data):
            return _spell_bytes(data)
        case nodes.CharSet(ranges):
            return _spelling(ranges)
        case nodes.Concat(items):
            return nodes.concat(*map(spell, items))
        case nodes.Alternation(items):
            return nodes.alternation(*map(spell, items))
        case nodes.Repeat(item, minimum, maximum):
            return nodes.repeat(spell(item), minimum, maximum)
        case nodes.Intersection(items):
            return nodes.Intersection(tuple(map(spell, items)))
        case nodes.Difference(item, minus):
            return nodes.Difference(spell(item), spell(minus))
        case nodes.Empty():
            return node
        case nodes.Graph(rows, accepting):
            return nodes.Graph(tuple(tuple((spell(item), target) for item, target in row) for row in rows), accepting)
        case nodes.Automaton():
            return _spelled(node)
        case nodes.Rule():
            raise AssertionError(f"the rule {node.name!r} is not a language of plain text")


def _spelled(automaton: nodes.Automaton) -> nodes.Automaton:
    """`automaton` with an escape in place of each byte that has one; the others stay as they are."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(automaton.num_states)]
    for state, row in enumerate(automaton.rows):
        behind: dict[bytes, int] = {}  # the states that follow the first bytes of an escape
        for low, high, target in row:
            rows[state] += [(max(low, a), min(high, b), target) for a, b in _RAW_BYTES if low <= b and a <= high]
            for code, text in _ESCAPES.items():
                if not low <= code <= high:
                    continue
                here, escape = state, text.encode()
                for i, byte in enumerate(escape[:-1], 1):
                    after = behind.get(escape[:i])
                    if after is None:
                        after = behind[escape[:i]] = len(rows)
                        rows.append([])
                        rows[here].append((byte, byte, after))
                    here = after
                rows[here].append((escape[-1], escape[-1], target))
    return nodes.Automaton.of(map(sorted, rows), automaton.ends.tolist())


def quoted(node: Node) -> Node:
    """A JSON string with `node`, already spelled, between its quotation marks."""
    return nodes.concat(QUOTE, node, QUOTE)


def string(text: str) -> Node:
    """The JSON string of `text`. Raises GrammarError for a lone surrogate."""
    return nodes.Literal(string_bytes(text))


def string_bytes(text: str) -> bytes:
    """The bytes of `string`."""
    return encoded(_encode(text))


def written(text: str) -> Node:
    """`text`, a JSON string with its quotation marks. Raises GrammarError for a lone surrogate."""
    return nodes.Literal(encoded(text))


def encoded(text: str) -> bytes:
    """`text` in UTF-8. Raises GrammarError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{text!r} holds a lone surrogate, which UTF-8 cannot write; remove it") from error


def inside(text: str) -> Node:
    """`text` as it is written inside a JSON string. Raises GrammarError for a lone surrogate."""
    return nodes.literal(bytes_inside(text))


def bytes_inside(text: str) -> bytes:
    """The bytes of `inside`."""
    return string_bytes(text)[1:-1]


def other_names(names: Iterable[str]) -> Node:
    """Any spelled text but `names`: follows their trie and leaves it somewhere."""
    trie: list[dict[str, int]] = [{}]
    ends: set[int] = set()
    for name in names:
        state = 0
        for char in name:
            after = trie[state].get(char)
            if after is None:
                after = trie[state][char] = len(trie)
                trie.append({})
            state = after
        ends.add(state)
    if not ends:
        return nodes.star(TEXT_CHAR)
    free, rest = len(trie), len(trie) + 1
    rows: list[tuple[tuple[Node, int], ...]] = []
    for row in trie:
        children = [(_char(char), after) for char, after in row.items()]
        if all(char in _PLAIN for char in row):  # what takes several bytes, to leave the trie, has its states once
            rows.append((*children, (_but(frozenset(row), _PLAIN_RANGES), free), (nodes.EMPTY, rest)))
        else:
            rows.append((*children, (_but(frozenset(row), nodes.ANY_CHAR.ranges), free)))
    others = spelling(nodes.complement(_PLAIN_RANGES))
    accepting = frozenset(range(free + 1)) - ends
    return nodes.Graph((*rows, ((TEXT_CHAR, free),), ((others, free),)), accepting)


_PLAIN = frozenset(map(chr, range(0x20, 0x7F))) - {'"', "\\"}
_PLAIN_RANGES = nodes.normalise((ord(char), ord(char)) for char in _PLAIN)


@lru_cache(maxsize=1024)
def _char(char: str) -> Node:
    return spelling([(ord(char), ord(char))])


@lru_cache(maxsize=4096)
def _but(chars: frozenset[str], ranges: tuple[Range, ...]) -> Node:
    """One character of `ranges` but these, as it is written."""
    return spelling(nodes.intersect(ranges, nodes.complement((ord(char), ord(char)) for char in chars)))


def _spell_bytes(data: bytes) -> Node:
    try:
        return nodes.literal(_encode(data.decode())[1:-1])
    except UnicodeDecodeError as error:
        raise AssertionError(f"{data!r} is not text") from error
