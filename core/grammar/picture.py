"""A small automaton as an SVG: states from left to right, runs of forced text as one edge."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from itertools import pairwise

from graftlm.core.grammar.automata import determinize
from graftlm.core.grammar.automata.dfa import START, Dfa

MAX_STATES = 60
_MAX_VISITED = 20 * MAX_STATES
"""Limit of the states before forced runs are merged; most of them spell keys."""
_DX, _DY, _RADIUS, _MARGIN = 190, 78, 15, 60
_LONGEST_LABEL = 24

Edges = dict[tuple[int, int], list[str]]


def draw(dfa: Dfa) -> str | None:
    """The compressed automaton; None when more than MAX_STATES states are left of it."""
    edges = _compressed(dfa)
    if edges is None:
        return None
    layers = _layers(edges)
    rows: dict[int, list[int]] = defaultdict(list)
    for state, layer in layers.items():
        rows[layer].append(state)
    tallest = max(map(len, rows.values()))
    place = {
        state: (_MARGIN + _DX * layer, _MARGIN + _DY * (i + (tallest - len(states)) / 2))
        for layer, states in rows.items()
        for i, state in enumerate(states)
    }
    names = {state: i for i, state in enumerate(layers)}
    width, height = 2 * _MARGIN + _DX * max(rows), 2 * _MARGIN + _DY * tallest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, monospace" font-size="12">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    x, y = place[START]
    parts.append(_line(f"M{x - 45} {y}L{x - _RADIUS} {y}"))
    labels = []
    for (source, target), texts in edges.items():
        path, at = _path(place[source], place[target])
        parts.append(_line(path))
        labels.append(_label(at, " | ".join(texts)))
    for state, (x, y) in place.items():
        parts.append(f'<circle cx="{x}" cy="{y}" r="{_RADIUS}" fill="#eef4ff" stroke="#335"/>')
        if dfa.accepting[state]:
            parts.append(f'<circle cx="{x}" cy="{y}" r="{_RADIUS - 4}" fill="none" stroke="#335"/>')
        parts.append(f'<text x="{x}" y="{y + 4}" text-anchor="middle">{names[state]}</text>')
    return "\n".join([*parts, *labels, "</svg>", ""])


def _compressed(dfa: Dfa) -> Edges | None:
    """Return edges between states with a choice, by the text on the way; None for more than MAX_STATES states."""
    found: Edges = {}
    work, seen = [START], {START}
    chosen: set[int] = set()  # states with more than one next character
    while work:
        if len(seen) > _MAX_VISITED:
            return None
        state = work.pop()
        chars: dict[int, set[int]] = defaultdict(set)
        for byte in range(0x80):
            for target in _targets(dfa, {state}, byte, byte):
                chars[target].add(byte)
        for first, last, num_more in ((0xC2, 0xDF, 1), (0xE0, 0xEF, 2), (0xF0, 0xF4, 3)):
            inside = _targets(dfa, {state}, first, last)
            for _ in range(num_more):
                inside = _targets(dfa, inside, 0x80, 0xBF)
            for target in inside:
                chars[target].add(0x80)
        if sum(map(len, chars.values())) != 1:
            chosen.add(state)
        for target, codes in chars.items():
            tail, end = dfa.run((target, *dfa.start[1:])) if not dfa.loops else (b"", (target,))
            text = _set(codes) if len(codes) > 1 or not tail else _shown(bytes(codes).decode("latin-1"))
            label = (
                text + _shown(tail.decode(errors="replace")) if len(codes) == 1 else f"{text} {_shown(tail.decode())}"
            )
            found.setdefault((state, end[0]), []).append(label.strip() or "␣")
            if end[0] not in seen:
                seen.add(end[0])
                work.append(end[0])
    merged = _merged(found, {START, *chosen, *(state for state in seen if dfa.accepting[state])})
    return merged if len({state for edge in merged for state in edge}) <= MAX_STATES else None


def _merged(edges: Edges, kept: set[int]) -> Edges:
    """Merge each state with one possible next character, unless it is `kept`, into the edges that lead to it."""
    out: dict[int, dict[int, list[str]]] = defaultdict(dict)
    into: dict[int, set[int]] = defaultdict(set)
    for (source, target), texts in edges.items():
        out[source][target] = texts
        into[target].add(source)
    for state in list(out):
        if state in kept:
            continue
        ((target, texts),) = out[state].items()
        for source in into.pop(state, set()):
            joined = [before + texts[0] for before in out[source].pop(state)]
            out[source].setdefault(target, []).extend(joined)
            into[target].add(source)
        into[target].discard(state)
        del out[state]
    return {(source, target): texts for source, targets in out.items() for target, texts in targets.items()}


def _targets(dfa: Dfa, states: set[int], first: int, last: int) -> set[int]:
    """The states that bytes `first` to `last` lead to, without regard to counters."""
    found = set()
    for state in states:
        for number in {int(dfa.table[state, kind]) for kind in set(dfa.classes[first : last + 1].tolist())}:
            if number < 0:
                targets = dfa.actions[-number, determinize.TARGET : determinize.TARGET + 3]
                found |= {int(target) for target in targets if target}
            elif number:
                found.add(number)
    return found


def _set(codes: set[int]) -> str:
    """Some characters in few: ranges, or all but a few."""
    printable = set(range(0x20, 0x7F))
    if len(codes & printable) > 60:
        missing = "".join(map(chr, sorted(printable - codes)))
        return f"any but {_shown(missing)}" if missing else "any"
    rest = sorted(codes - {0x80})
    runs: list[list[int]] = [[code] for code in rest[:1]]
    for before, code in pairwise(rest):
        if code == before + 1:
            runs[-1].append(code)
        else:
            runs.append([code])
    shown = [
        _shown(chr(run[0])) + (f"–{_shown(chr(run[-1]))}" if len(run) > 2 else "".join(map(_shown, map(chr, run[1:]))))
        for run in runs
    ]
    return " ".join([*shown, *(["non-ASCII"] if 0x80 in codes else [])])


def _shown(text: str) -> str:
    return "".join("␣" if char == " " else char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def _layers(edges: Edges) -> dict[int, int]:
    """The states in the order in which they are met, with their columns: how many edges lead there; ends come last."""
    found, work = {START: 0}, [START]
    for state in work:
        for source, target in edges:
            if source == state and target not in found:
                found[target] = found[state] + 1
                work.append(target)
    last = max(found.values())
    ends = [state for state in found if all(source != state for source, _ in edges)]
    return found | dict.fromkeys(ends, last + 1)


def _path(source: tuple[float, float], target: tuple[float, float]) -> tuple[str, tuple[float, float]]:
    """A curve from one state to another, and where its label stands."""
    (x, y), (u, v) = source, target
    if source == target:
        return f"M{x - 8} {y - 13}C{x - 30} {y - 48} {x + 30} {y - 48} {x + 8} {y - 13}", (x, y - 42)
    if u > x:
        bend = 0.0 if u - x <= _DX or v != y else -40.0 * (u - x) / _DX
        middle = (x + u) / 2
        path = f"M{x + _RADIUS} {y}C{middle} {y + bend} {middle} {v + bend} {u - _RADIUS} {v}"
        return path, (middle, (y + v) / 2 + 0.75 * bend - 4)
    bend = 34.0 + 10 * abs(x - u) / _DX
    side = 30 if u == x else 0
    path = f"M{x} {y + _RADIUS}C{x + side} {y + bend} {u + side} {v + bend} {u} {v + _RADIUS}"
    return path, ((x + u) / 2 + side, (y + v) / 2 + 0.75 * bend + 6)


def _line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#tip)"/>'


def _label(at: tuple[float, float], text: str) -> str:
    short = text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"
    x, y = at
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" stroke="white" stroke-width="4" paint-order="stroke">'
        f"{escape(short)}<title>{escape(text)}</title></text>"
    )
