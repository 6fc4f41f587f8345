"""Letters: the characters that texts of a language begin with and are made of, as its node shows without an automaton.

Patterns of one schema mostly exclude each other for their letters: one begins with a slash and the other does not, or
one needs a dollar sign that the other has nowhere, or they end with other words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.nodes.nodes import Node, Range

Ranges = tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Letters:
    """What is known of all texts of a language.

    first  a text that is not empty begins with one of them
    any    all characters of a text are among them
    empty  whether the empty text may be among them
    """

    first: Ranges
    any: Ranges
    empty: bool


_MOST_ENDINGS = 16
_NOTHING_KNOWN = Letters(nodes.ANY_CHAR.ranges, nodes.ANY_CHAR.ranges, True)


def are_apart(one: Node, other: Node) -> bool:
    """Whether letters show that no text matches both."""
    here, there = _beginning(one), _beginning(other)
    length = min(len(here), len(there))
    if here[:length] != there[:length]:
        return True
    if all([not (a.endswith(b) or b.endswith(a)) for a in _endings(one)[0] for b in _endings(other)[0]]):
        return True
    a, b = letters(one), letters(other)
    if not a.empty and not b.empty and not nodes.intersect(a.first, b.first):
        return True
    return not _is_made_of(one, b.any, {}) or not _is_made_of(other, a.any, {})


def _beginning(node: Node) -> bytes:
    """What all texts begin with, as far as it is written so."""
    if isinstance(node, nodes.Concat):
        node = node.items[0]
    return node.data if isinstance(node, nodes.Literal) else b""


_NO_ENDINGS = frozenset({b""}), False


@lru_cache(maxsize=1024)
def _endings(node: Node) -> tuple[frozenset[bytes], bool]:
    """What texts end with, one of these each, as far as it is written so; and whether these are the whole texts."""
    match node:
        case nodes.Literal(data):
            return frozenset({data}), True
        case nodes.Concat(items):
            endings, is_whole = frozenset({b""}), True
            for item in reversed(items):
                before, is_whole = _endings(item)
                if len(before) * len(endings) > _MOST_ENDINGS:
                    return endings, False
                endings = frozenset([one + other for one in before for other in endings])
                if not is_whole:
                    break
            return endings, is_whole
        case nodes.Alternation(items) if 0 < len(items) <= _MOST_ENDINGS:
            found = list(map(_endings, items))
            endings = frozenset[bytes]().union(*[one for one, _ in found])
            return (endings, all([one for _, one in found])) if len(endings) <= _MOST_ENDINGS else _NO_ENDINGS
        case _:
            return _NO_ENDINGS


def _is_made_of(node: Node, allowed: Ranges, known: dict[int, bool]) -> bool:
    """Whether some text of `node` may have no other characters. known: by id, of shared parts"""
    found = known.get(id(node))
    if found is None:
        match node:
            case nodes.Literal(data):
                codes = set(map(ord, data.decode()))
                found = all([any([low <= code <= high for low, high in allowed]) for code in codes])
            case nodes.CharSet(ranges):
                found = bool(nodes.intersect(ranges, allowed))
            case nodes.Concat(items) | nodes.Intersection(items):
                found = all(_is_made_of(item, allowed, known) for item in items)
            case nodes.Alternation(items):
                found = any(_is_made_of(item, allowed, known) for item in items)
            case nodes.Repeat(item, minimum, _):
                found = not minimum or _is_made_of(item, allowed, known)
            case nodes.Difference(item, _):
                found = _is_made_of(item, allowed, known)
            case nodes.Graph(rows, accepting):
                seen, work = {0}, [0]
                while work:
                    for item, target in rows[work.pop()]:
                        if target not in seen and _is_made_of(item, allowed, known):
                            seen.add(target)
                            work.append(target)
                found = not seen.isdisjoint(accepting)
            case _:
                found = True
        known[id(node)] = found
    return found


@lru_cache(maxsize=1024)
def letters(node: Node) -> Letters:
    """The letters of `node`, which is regular."""
    return _letters(node)


def _letters(node: Node) -> Letters:
    match node:
        case nodes.Literal(data):
            codes = list(map(ord, data.decode()))
            return Letters(((codes[0], codes[0]),), nodes.normalise([(code, code) for code in codes]), False)
        case nodes.CharSet(ranges):
            return Letters(ranges, ranges, False)
        case nodes.Concat(items):
            return _row(list(map(_letters, items)))
        case nodes.Alternation(items) if items:
            return _choice(list(map(_letters, items)))
        case nodes.Repeat(item, minimum, maximum) if maximum != 0:
            found = _letters(item)
            return found if minimum else Letters(found.first, found.any, True)
        case nodes.Intersection(items):
            return _letters(items[0])
        case nodes.Difference(item, _):
            return _letters(item)
        case nodes.Graph():
            return _walk(node)
        case nodes.Empty():
            return Letters((), (), True)
        case _:
            return _NOTHING_KNOWN


def _row(items: list[Letters]) -> Letters:
    first: list[Range] = []
    for item in items:
        first += item.first
        if not item.empty:
            break
    return Letters(
        nodes.normalise(first),
        nodes.normalise([one for item in items for one in item.any]),
        all([item.empty for item in items]),
    )


def _choice(items: list[Letters]) -> Letters:
    return Letters(
        nodes.normalise([one for item in items for one in item.first]),
        nodes.normalise([one for item in items for one in item.any]),
        any([item.empty for item in items]),
    )


def _walk(node: nodes.Graph) -> Letters:
    rows, live = node.rows, _live(node)
    found = {id(item): _letters(item) for row in rows for item, target in row if target in live}
    first: list[Range] = []
    begun, work = {0}, [0]
    while work:
        for item, target in rows[work.pop()]:
            if target in live:
                here = found[id(item)]
                first += here.first
                if here.empty and target not in begun:
                    begun.add(target)
                    work.append(target)
    everything = nodes.normalise([one for here in found.values() for one in here.any])
    return Letters(nodes.normalise(first), everything, not begun.isdisjoint(node.accepting))


def _live(node: nodes.Graph) -> set[int]:
    """The states from which a walk may come to an end."""
    sources: list[list[int]] = [[] for _ in node.rows]
    for state, row in enumerate(node.rows):
        for _, target in row:
            sources[target].append(state)
    live, work = set(node.accepting), list(node.accepting)
    while work:
        for source in sources[work.pop()]:
            if source not in live:
                live.add(source)
                work.append(source)
    return live
