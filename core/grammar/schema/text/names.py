"""The names that an object does not list, as a byte automaton: the trie of those it lists, and what leaves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import numpy as np

from graftlm.core.grammar.automata.array_automaton import ArrayAutomaton
from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.text import json_text
from graftlm.core.grammar.schema.text.name_trie import FREE, leave_trie

_encode = json.JSONEncoder(ensure_ascii=False, separators=("", "")).encode


def names_but(names: Sequence[str]) -> ArrayAutomaton:
    """The automaton of `json_text.other_names`; `names` has at least one. Raises GrammarError for a lone surrogate."""
    data = json_text.encoded(_encode(names)[1:-1])
    edges, ends, num_states = leave_trie(np.frombuffer(bytearray(data), np.uint8), *_text())
    return ArrayAutomaton(num_states, edges, ends)


@cache
def _text() -> tuple[Int32Array, Int32Array]:
    """The edges of any text that is not empty, as `leave_trie` wants them."""
    found = product.product(nodes.concat(json_text.NAME_CHAR, nodes.star(json_text.TEXT_CHAR)))
    assert found.rows[0][0] == (0x20, 0x21, FREE)
    edges = [(state, target, low, high) for state, row in enumerate(found.rows) for low, high, target in row]
    starts = np.cumsum([0, *map(len, found.rows)])
    return np.array(edges, np.int32), starts.astype(np.int32)
