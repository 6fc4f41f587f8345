"""A byte automaton of plain text as the same text is written inside a JSON string."""

from __future__ import annotations

import json

from graftlm.core.grammar.nodes.nodes import Automaton

_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xFF))
_ESCAPES = {code: json.dumps(chr(code))[1:-1].encode() for code in (*range(0x20), 0x22, 0x5C)}


def spelled(automaton: Automaton) -> Automaton:
    """`automaton` with an escape in place of each byte that has one; the others stay as they are."""
    rows: list[list[tuple[int, int, int]]] = [[] for _ in automaton.rows]
    for state, row in enumerate(automaton.rows):
        behind: dict[bytes, int] = {}  # the states that follow the first bytes of an escape
        for low, high, target in row:
            rows[state] += [(max(low, a), min(high, b), target) for a, b in _PLAIN if low <= b and a <= high]
            for code, escape in _ESCAPES.items():
                if not low <= code <= high:
                    continue
                here = state
                for i, byte in enumerate(escape[:-1], 1):
                    after = behind.get(escape[:i])
                    if after is None:
                        after = behind[escape[:i]] = len(rows)
                        rows.append([])
                        rows[here].append((byte, byte, after))
                    here = after
                rows[here].append((escape[-1], escape[-1], target))
    return Automaton(tuple(tuple(sorted(row)) for row in rows), automaton.accepting)
