"""LeavingTokens: tokens that begin with characters of one class and leave it, by how many characters that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.grammar.automata.jit import Int32Array
from graftlm.core.grammar.masks.trie.trie import SortedTokens, lay_out

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class LeavingTokens:
    """For each number of characters, a trie of what follows them.

    In a repeat all characters of its class lead to the same state, so tokens that differ in these characters alone are
    allowed together, and the trie holds one of them.

    nodes      int32 [num_nodes, 4], as in a Trie: the tries one after the other
    twins      int32 [num_twins, 2]: a token in the trie, and another one that differs from it in its characters
    first      int32 [largest number of characters + 2]: the first node of the trie for each number
    max_depth  bytes of the longest text after the characters
    character  a byte that is a character of the class
    """

    nodes: Int32Array
    twins: Int32Array
    first: Int32Array
    max_depth: int
    character: int

    @classmethod
    def of(
        cls,
        tokens: SortedTokens,
        places: npt.NDArray[np.int64],
        num_characters: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        character: int,
    ) -> LeavingTokens:
        """Build the tries of some tokens.

        places          int64 [num]: which of `tokens`
        num_characters  int64 [num]: characters of the class that each of them begins with
        ends            int64 [num]: where these characters end in `tokens.data`
        character       a byte that is a character of the class
        """
        data = tokens.data.tobytes()
        ends_at, last = ends.tolist(), tokens.offsets[places + 1].tolist()
        texts = [data[end:until] for end, until in zip(ends_at, last, strict=True)]
        order = sorted(range(len(texts)), key=lambda i: (num_characters[i], texts[i]))
        sorted_texts = [texts[i] for i in order]
        offsets = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, sorted_texts), np.int64, len(order)), out=offsets[1:])
        counts = num_characters[order]
        joined = np.frombuffer(b"".join(sorted_texts), np.uint8)
        nodes, twins, before = lay_out(tokens.ids[places[order]], joined, offsets[:-1], np.diff(offsets), counts)
        begins = np.searchsorted(counts, np.arange(int(counts.max(initial=-1)) + 2))
        first = np.append(before, len(nodes))[begins].astype(np.int32)
        return cls(nodes, twins, first, int(nodes[:, 1].max(initial=0)), character)
