"""The names that an object does not list, as a byte automaton: the trie of the listed names, and what leaves it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array, loop
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.nodes import nodes
from graftlm.core.grammar.schema.text import json_text

if TYPE_CHECKING:
    import numpy.typing as npt

    UInt8Array = npt.NDArray[np.uint8]

FREE = 1
"""The state of a text after a character, whatever follows."""
_encode = json.JSONEncoder(ensure_ascii=False, separators=("", "")).encode
_QUOTE, _BACKSLASH = 0x22, 0x5C


@loop("Tuple((i4[:,::1], i4[::1], i8))(u1[::1], i4[:,::1], i4[::1])", quick=True)
def leave_trie(names: UInt8Array, text: Int32Array, text_ptr: Int32Array) -> tuple[Int32Array, Int32Array, int]:
    """The automaton of all texts but `names`.

    names     uint8: JSON strings, each between its quotation marks
    text      int32 [num_text_edges, 4]: source, target, lowest and highest byte of any text. State 0 comes before a
              character, FREE after one, the others lie within one
    text_ptr  int32 [num_text_states + 1]: where the edges of each state begin

    The states of the trie, which begins at state 0, are numbered after those of the text.

    -> edges, int32 [num_edges, 4], as `text` has them; the accepting states, int32; the number of states
    """
    capacity = len(names) + 1
    # of each state of the trie the first one below it, the next one beside it, in the order of their bytes, the byte
    # that leads to it, where the text is then, and whether a name ends there
    below, beside = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    byte_of, within = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    is_name = np.zeros(capacity, np.bool_)
    num_states, state = 1, -1
    is_escaped = False
    for byte in names:
        if byte == _QUOTE and not is_escaped:
            if state < 0:
                state = 0
            else:
                is_name[state] = True
                state = -1
            continue
        is_escaped = byte == _BACKSLASH and not is_escaped
        previous, after = 0, below[state]
        while after != 0 and byte_of[after] < byte:
            previous, after = after, beside[after]
        if after == 0 or byte_of[after] != byte:
            after = num_states
            num_states += 1
            byte_of[after] = byte
            if previous == 0:
                beside[after] = below[state]
                below[state] = after
            else:
                beside[after] = beside[previous]
                beside[previous] = after
            for e in range(text_ptr[within[state]], text_ptr[within[state] + 1]):
                if text[e, 2] <= byte <= text[e, 3] and text[e, 1] != FREE:
                    within[after] = text[e, 1]
        state = after
    shift = len(text_ptr) - 2
    width = 0
    for state in range(len(text_ptr) - 1):
        width = max(width, text_ptr[state + 1] - text_ptr[state])
    edges = np.empty((len(text) + (width + 2) * num_states, 4), np.int32)
    ends = np.empty(num_states + 1, np.int32)
    ends[0] = FREE
    num_edges, num_ends = 0, 1
    for state in range(num_states):
        source = state + shift if state > 0 else 0
        if within[state] == 0 and not is_name[state]:
            ends[num_ends] = source
            num_ends += 1
        after = below[state]
        for e in range(text_ptr[within[state]], text_ptr[within[state] + 1]):
            low, high = text[e, 2], text[e, 3]
            while after != 0 and byte_of[after] <= high:
                byte = byte_of[after]
                if low < byte:
                    edges[num_edges, 0], edges[num_edges, 1] = source, text[e, 1]
                    edges[num_edges, 2], edges[num_edges, 3] = low, byte - 1
                    num_edges += 1
                edges[num_edges, 0], edges[num_edges, 1] = source, after + shift
                edges[num_edges, 2] = edges[num_edges, 3] = byte
                num_edges += 1
                low, after = byte + 1, beside[after]
            if low <= high:
                edges[num_edges, 0], edges[num_edges, 1] = source, text[e, 1]
                edges[num_edges, 2], edges[num_edges, 3] = low, high
                num_edges += 1
        if state == 0:
            for e in range(text_ptr[1], len(text)):
                edges[num_edges] = text[e]
                num_edges += 1
    return edges[:num_edges].copy(), ends[:num_ends].copy(), num_states + shift


def names_but(names: Sequence[str]) -> nodes.Automaton:
    """The automaton of `json_text.other_names`; `names` has at least one. Raises GrammarError for a lone surrogate."""
    data = json_text.encoded(_encode(names)[1:-1])
    edges, ends, num_states = leave_trie(np.frombuffer(bytearray(data), np.uint8), *_text())
    return nodes.Automaton(num_states, edges, ends)


@cache
def _text() -> tuple[Int32Array, Int32Array]:
    """The edges of any text that is not empty, as `leave_trie` wants them."""
    found = product.product(nodes.concat(json_text.NAME_CHAR, nodes.star(json_text.TEXT_CHAR)))
    assert found.edges[0].tolist() == [0, FREE, 0x20, 0x21]
    starts = np.searchsorted(found.edges[:, 0], np.arange(found.num_states + 1))
    return found.edges, starts.astype(np.int32)
