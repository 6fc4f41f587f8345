"""The texts that a string schema admits: its patterns, formats and lengths as one language."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node
from graftlm.core.grammar.regex import parser
from graftlm.core.grammar.schema.algebra.formats import FORMATS, WIDE_FORMATS, ContentFormat
from graftlm.core.grammar.schema.algebra.shapes import Text
from graftlm.core.grammar.schema.text import json_text

ONE_SPELLING = ""
"""A pattern that every text contains, and with which each character is written in one way."""


@lru_cache(maxsize=1024)
def pattern_node(pattern: str, wide: bool = False) -> Node:
    """Plain texts that contain a match of `pattern` in every common dialect or, with `wide`, in one of them.

    Raises GrammarError with a position.
    """
    return parser.parse(pattern, search=True, portable=True, wide=wide)


@lru_cache(maxsize=1024)
def spelled_pattern(pattern: str, wide: bool = False) -> Node:
    """The same as it is written inside a JSON string."""
    return json_text.spell(pattern_node(pattern, wide))


def spelled_patterns(patterns: tuple[str, ...], wide: bool = False) -> Node:
    """The same of texts that contain a match of any of `patterns`."""
    if len(patterns) > 1:
        with suppress(GrammarError):  # a group's name in two of them, or too deep
            # as one pattern: an automaton of several keeps apart which of them it has found
            return spelled_pattern("|".join(f"(?:{pattern})" for pattern in patterns), wide)
    return nodes.alternation(*(spelled_pattern(pattern, wide) for pattern in patterns))


@lru_cache(maxsize=64)
def format_node(name: str) -> Node:
    """Plain texts of format `name`."""
    if isinstance(name, ContentFormat):
        return name.node
    return parser.parse(FORMATS[name])


def contains(pattern: str, text: str) -> bool:
    """Whether `pattern` matches somewhere in `text`."""
    return product.matches(pattern_node(pattern), text)


def node(shape: Text) -> Node:
    """The texts of `shape` as they are written inside a JSON string, without the quotation marks."""
    if shape == Text(shape.min_length, shape.max_length, (ONE_SPELLING,)):
        return nodes.repeat(json_text.NAME_CHAR, shape.min_length, shape.max_length)
    parts, refused = _parts(shape), _refused(shape)
    if not parts and not refused:
        return nodes.repeat(json_text.TEXT_CHAR, shape.min_length, shape.max_length)
    return json_text.spell(_combined(parts, refused, shape))


@lru_cache(maxsize=1024)
def quoted(shape: Text) -> Node:
    """The JSON strings of `shape`; one node for all schemas that ask for the same texts."""
    return json_text.quoted(node(shape))


@lru_cache(maxsize=4096)
def is_empty(shape: Text) -> bool:
    """Whether it is certain that no text has this shape."""
    low, high = shape.min_length, shape.max_length
    if high is not None and low > high:
        return True
    is_plain = not (shape.patterns or shape.formats or shape.no_patterns or shape.no_formats)
    if is_plain and (high is None or not shape.no_texts):
        return False  # all texts, or all but a few
    if not frozenset(shape.patterns).isdisjoint(shape.no_patterns):  # what all dialects match, one does
        return True
    parts, refused = _parts(shape), _refused(shape)
    free = _combined(parts, refused, replace(shape, min_length=0, max_length=None))
    if len(parts) == 1 and not refused:
        if (low, high) == (0, None):
            return free == nodes.NOTHING
        shortest, longest = lengths(free)
        if low <= shortest and (high is None or (longest or high + 1) <= high):
            return free == nodes.NOTHING
    try:
        return not product.has_length(free, low, high)
    except GrammarError:  # too large to say
        return False


def admits(shape: Text, text: str) -> bool:
    """Whether `text` has this shape."""
    if len(text) < shape.min_length or (shape.max_length is not None and len(text) > shape.max_length):
        return False
    if shape.no_texts and text in _plain_texts(shape.no_texts):
        return False
    return (
        all(product.matches(pattern_node(pattern), text) for pattern in shape.patterns)
        and all(product.matches(format_node(name), _spelled_for(name, text)) for name in shape.formats)
        and not any(product.matches(part, text) for part in _refused_kinds(shape))
    )


@lru_cache(maxsize=256)
def _plain_texts(texts: tuple[str, ...]) -> frozenset[str]:
    """The strings with these JSON texts."""
    return frozenset(map(json.loads, texts))


def _spelled_for(name: str, text: str) -> str:
    """`text` as it is looked for in the format `name`: JSON inside a string may have blanks, which are not written."""
    if isinstance(name, ContentFormat):
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    return text


def _parts(shape: Text) -> list[Node]:
    return [*(pattern_node(pattern) for pattern in shape.patterns), *(format_node(name) for name in shape.formats)]


def _refused(shape: Text) -> list[Node]:
    """What a text of `shape` must not match: all that any dialect matches, and any reader takes for the format."""
    found = _refused_kinds(shape)
    if shape.no_texts:
        found.append(nodes.alternation(*(nodes.literal(json.loads(text)) for text in shape.no_texts)))
    return found


def _refused_kinds(shape: Text) -> list[Node]:
    """The same but for single texts."""
    found = [pattern_node(pattern, wide=True) for pattern in shape.no_patterns]
    return found + [wide_format_node(name) for name in shape.no_formats]


@lru_cache(maxsize=64)
def wide_format_node(name: str) -> Node:
    """Plain texts that some reader takes for format `name`."""
    return parser.parse(WIDE_FORMATS.get(name, "(?s:.*)"))


def _combined(parts: list[Node], refused: list[Node], shape: Text) -> Node:
    whole = _all_of(parts, shape)
    return nodes.Difference(whole, nodes.alternation(*refused)) if refused else whole


def _all_of(parts: list[Node], shape: Text) -> Node:
    low, high = shape.min_length, shape.max_length
    if high is not None and low > high:
        return nodes.NOTHING
    parts = list(dict.fromkeys(parts))
    if not parts:
        return nodes.repeat(nodes.ANY_CHAR, low, high)
    if len(parts) == 1:
        fitted = _fit(parts[0], low, high)
        if fitted is not None:
            return fitted
    if (low, high) != (0, None):
        parts.append(nodes.repeat(nodes.ANY_CHAR, low, high))
    return nodes.Intersection(tuple(parts)) if len(parts) > 1 else parts[0]


def _fit(part: Node, low: int, high: int | None) -> Node | None:
    """`part` within the lengths, where that takes no automaton: all of it fits, or it repeats single characters."""
    if (low, high) == (0, None):
        return part
    shortest, longest = lengths(part)
    if low <= shortest and (high is None or (longest is not None and longest <= high)):
        return part
    items: list[Node] = list(part.items) if isinstance(part, nodes.Concat) else [part]
    if not all(isinstance(item, nodes.CharSet) for item in items if not isinstance(item, nodes.Repeat)):
        return None
    repeats = [i for i, item in enumerate(items) if isinstance(item, nodes.Repeat)]
    if len(repeats) != 1:
        return None
    repeated = items[repeats[0]]
    assert isinstance(repeated, nodes.Repeat)
    if not isinstance(repeated.item, nodes.CharSet):
        return None
    fixed = len(items) - 1
    least = max(repeated.min, low - fixed)
    most = repeated.max if high is None else high - fixed
    if high is not None and repeated.max is not None:
        most = min(repeated.max, high - fixed)
    if most is not None and most < least:
        return nodes.NOTHING
    items[repeats[0]] = nodes.repeat(repeated.item, least, most)
    return nodes.concat(*items)


def lengths(part: Node) -> tuple[int, int | None]:
    """Fewest and most characters (None: no end) of a text that matches `part`."""
    match part:
        case nodes.Literal(data):
            return (len(data.decode()),) * 2
        case nodes.CharSet():
            return 1, 1
        case nodes.Concat(items):
            found = [lengths(item) for item in items]
            return sum(low for low, _ in found), _total([high for _, high in found])
        case nodes.Alternation(items) if items:
            found = [lengths(item) for item in items]
            highs = [high for _, high in found if high is not None]
            return min(low for low, _ in found), max(highs) if len(highs) == len(found) else None
        case nodes.Repeat(item, minimum, maximum):
            low, high = lengths(item)
            return low * minimum, None if maximum is None or high is None else high * maximum
        case nodes.Intersection(items):
            return lengths(items[0])
        case nodes.Difference(item, _):
            return lengths(item)
        case nodes.Graph():
            return 0, None
        case _:
            return 0, 0


def _total(parts: list[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
