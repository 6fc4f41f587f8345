"""Rules that begin with themselves, written as repeats: `sum: sum "+" term | term` is `term ("+" term)*`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graftlm.core.grammar import ast
from graftlm.core.grammar.ast import Node
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.survey import survey

_MAX_PLACES = 20_000  # of a rule, in which others are written out
_MAX_WAYS = 1_000  # of a rule, after others were written out
_MAX_CIRCLE = 20  # rules that begin with one another


def without_left_recursion(rules: dict[str, Node]) -> dict[str, Node]:
    """The same rules, none of which begins with itself, where that is found to be possible."""
    try:
        return _repeating(rules)
    except _TooManyWaysError:
        return rules


class _TooManyWaysError(Exception):
    pass


def _repeating(rules: dict[str, Node]) -> dict[str, Node]:
    found = dict(rules)
    for circle in _circles(_firsts(found)):
        for i, name in enumerate(circle):
            before = frozenset(circle[:i])
            ways = _begun(found[name], before | {name})
            for _ in circle:
                if len(ways) > _MAX_WAYS or len(circle) > _MAX_CIRCLE:
                    raise _TooManyWaysError
                ways = [after for way in ways for after in _written_out(way, before, found)]
            node = _as_repeat(name, [after for way in ways for after in _begun(way, frozenset({name}))])
            if node is None or survey(node).num_places > _MAX_PLACES:
                raise _TooManyWaysError
            found[name] = node
    return found


def is_left_recursive(rules: dict[str, Node]) -> bool:
    """Whether a rule may begin with itself."""
    return bool(_circles(_firsts(rules)))


def _written_out(way: Node, names: frozenset[str], rules: dict[str, Node]) -> list[Node]:
    """`way` or, where it begins with one of `names`, the ways that result from what that one says."""
    check()
    first, rest = _split(way)
    if not isinstance(first, ast.Rule) or first.name not in names:
        return [way]
    return _begun(ast.concat(rules[first.name], rest), names)


def _as_repeat(name: str, ways: list[Node]) -> Node | None:
    """The rule `name` of these ways without those that begin with itself; None if it has no others."""
    others, loops = list[Node](), list[Node]()
    for way in ways:
        first, rest = _split(way)
        if first == ast.Rule(name):
            loops.append(rest)
        else:
            others.append(way)
    loops = [loop for loop in loops if loop != ast.EMPTY]
    if not others:
        return None
    start = ast.alternation(*others)
    return ast.concat(start, ast.repeat(ast.alternation(*loops))) if loops else start


def _begun(node: Node, names: frozenset[str]) -> list[Node]:
    """The ways of `node`, apart from each other as far as rules of `names` stand at their beginnings."""
    if names.isdisjoint(survey(node).inner):
        return [node]
    if isinstance(node, ast.Alternation):
        return [way for item in node.items for way in _begun(item, names)]
    if isinstance(node, ast.Repeat):
        again = ast.repeat(node.item, max(node.min - 1, 0), None if node.max is None else node.max - 1)
        some = [ast.concat(way, again) for way in _begun(node.item, names)]
        return some if node.min else [ast.EMPTY, *some]
    if isinstance(node, ast.Concat):
        first, rest = node.items[0], ast.concat(*node.items[1:])
        if names.isdisjoint(survey(first).inner):
            ways = _with_empty(first)
            if ast.EMPTY not in ways:
                return [node]
            return [
                found
                for way in ways
                for found in ([ast.concat(way, rest)] if way != ast.EMPTY else _begun(rest, names))
            ]
        return [ast.concat(way, rest) for way in _begun(first, names)]
    return [node]


def _with_empty(node: Node) -> list[Node]:
    """`node`, or its ways apart from the empty text where that is seen at once to be one of them."""
    if isinstance(node, ast.Alternation):
        return list(node.items)
    if isinstance(node, ast.Repeat) and node.min == 0:
        again = ast.repeat(node.item, 0, None if node.max is None else node.max - 1)
        return [ast.EMPTY, ast.concat(node.item, again)]
    return [node]


def _split(way: Node) -> tuple[Node, Node]:
    """What `way` begins with, and the rest."""
    return (way.items[0], ast.concat(*way.items[1:])) if isinstance(way, ast.Concat) else (way, ast.EMPTY)


def _firsts(rules: dict[str, Node]) -> dict[str, tuple[str, ...]]:
    """For each rule those that it may begin with."""
    empty = holding(rules, _nullable)
    return {name: tuple(dict.fromkeys(_first(node, empty))) for name, node in rules.items()}


def holding(rules: dict[str, Node], holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """The rules of which `holds` is true, where it asks of a node that names others whether it is true of these."""
    found: set[str] = set()
    waiting: dict[str, set[str]] = {}  # rules to look at again, by the rule that they wait for
    work = list(rules)
    while work:
        name = work.pop()
        if name in found:
            continue
        check()
        if holds(rules[name], found):
            found.add(name)
            work += waiting.pop(name, ())
        else:
            for inner in survey(rules[name]).inner:
                if inner not in found:
                    waiting.setdefault(inner, set()).add(name)
    return found


def _nullable(node: Node, empty: set[str]) -> bool:
    """Whether `node` has the empty text, where these rules have it."""
    if isinstance(node, ast.Rule):
        return node.name in empty
    if isinstance(node, ast.Concat | ast.Intersection):
        return all(_nullable(item, empty) for item in node.items)
    if isinstance(node, ast.Alternation):
        return any(_nullable(item, empty) for item in node.items)
    if isinstance(node, ast.Repeat):
        return node.min == 0 or _nullable(node.item, empty)
    return ast.nullable(node)


def _first(node: Node, empty: set[str]) -> Iterable[str]:
    if isinstance(node, ast.Rule):
        yield node.name
    elif isinstance(node, ast.Alternation | ast.Intersection):
        for item in node.items:
            yield from _first(item, empty)
    elif isinstance(node, ast.Repeat):
        yield from _first(node.item, empty)
    elif isinstance(node, ast.Concat):
        for item in node.items:
            yield from _first(item, empty)
            if not _nullable(item, empty):
                return


def _circles(edges: dict[str, tuple[str, ...]]) -> list[list[str]]:
    """The sets of names from which each leads to each other one along `edges`, or to itself."""
    index, low = dict[str, int](), dict[str, int]()
    stack, open_, circles = list[str](), set[str](), list[list[str]]()
    for start in edges:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        open_.add(start)
        work = [(start, iter(edges[start]))]
        while work:
            name, left = work[-1]
            below = next((inner for inner in left if inner in edges), None)
            if below is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    at = stack.index(name)
                    circle = stack[at:]
                    del stack[at:]
                    open_.difference_update(circle)
                    if len(circle) > 1 or name in edges[name]:
                        circles.append(circle)
            elif below in open_:
                low[name] = min(low[name], index[below])
            elif below not in index:
                index[below] = low[below] = len(index)
                stack.append(below)
                open_.add(below)
                work.append((below, iter(edges[below])))
    return circles
