"""Vocabularies without a token for every byte: from which states they can still spell a complete text.

With a token for every byte, any text can be written, and a state of the automaton is never a dead end. The same holds
if each state can end by bytes that are tokens: most vocabularies of real models lack a few bytes that JSON may contain,
and no text depends on them. Elsewhere a mask must not allow a token after which no other fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import START, UNREACHABLE, Dfa
from graftlm.core.grammar.automata.distances import list_ways, measure
from graftlm.core.grammar.automata.jit import Int32Array, loop
from graftlm.core.grammar.budget import check
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy.typing as npt

    from graftlm.core.grammar.automata.stack.dpda import Dpda

_STATES_A_CALL = 64  # between two looks at the clock
_FAR = np.iinfo(np.int32).max


def is_complete(automaton: Dfa | Dpda, vocabulary: Vocabulary) -> bool:
    """Whether every byte that occurs in the language is a token."""
    if vocabulary.single_bytes.all():
        return True
    used = (automaton.table != 0).any(axis=0)[automaton.classes]
    return not (used & ~vocabulary.single_bytes).any()


def of_single_bytes(dfa: Dfa, vocabulary: Vocabulary) -> Dfa | None:
    """Return `dfa` without the bytes that are no tokens, with its distances; None where a state cannot end so.

    With counters, each round of a repeat is spelled as the first: a state that ends with free counters ends with any.
    """
    if is_complete(dfa, vocabulary):
        return dfa
    old = np.where(vocabulary.single_bytes, dfa.classes.astype(np.int64), -1)
    begins = np.flatnonzero(np.diff(old, prepend=-2))
    classes = np.repeat(np.arange(len(begins)), np.diff(begins, append=256)).astype(np.uint8)
    columns = old[begins]
    table = np.ascontiguousarray(np.where(columns >= 0, dfa.table[:, columns], 0), np.int32)
    distance = np.where(dfa.accepting, 0, UNREACHABLE).astype(np.int32)
    measure(*list_ways(table), dfa.actions, distance)
    if ((distance == UNREACHABLE) & (dfa.distance != UNREACHABLE)).any():
        return None
    return replace(dfa, classes=classes, table=table, distance=distance)


@dataclass(frozen=True, eq=False)
class Spelling:
    """How each state of an automaton without counters is brought to an end, in tokens.

    num_tokens  int32 [num_states]: fewest tokens to an accepting state; 2**31 - 1 where there is no way
    next_token  int32 [num_states]: the first of them
    """

    num_tokens: Int32Array
    next_token: Int32Array

    @classmethod
    def of(cls, dfa: Dfa, vocabulary: Vocabulary) -> Spelling:
        """Raises GrammarError when no tokens spell any text of the language."""
        num_tokens = np.where(dfa.accepting, 0, _FAR).astype(np.int32)
        next_token = np.full(dfa.num_states, -1, np.int32)
        trie = vocabulary.trie
        states = np.empty(trie.max_depth + 1, np.int32)
        changed = True
        while changed:
            changed = False
            for last in range(dfa.num_states, 1, -_STATES_A_CALL):
                check()
                first = max(1, last - _STATES_A_CALL)
                arrays = (trie.nodes, dfa.table, dfa.classes, states, num_tokens, next_token)
                changed |= bool(_relax_tokens(*arrays, first, last))
        if num_tokens[START] == _FAR:
            raise GrammarError(
                f"no tokens of the vocabulary ({vocabulary.vocab_size:,} tokens) spell a text that the constraint "
                "allows; use a tokenizer with byte fallback or a constraint within its alphabet"
            )
        return cls(num_tokens, next_token)

    @cached_property
    def reachable(self) -> npt.NDArray[np.bool_]:
        """bool [num_states]: the state can be brought to an end."""
        ends: npt.NDArray[np.bool_] = self.num_tokens != _FAR
        return ends

    def ending(self, dfa: Dfa, vocabulary: Vocabulary, state: int) -> list[int]:
        """The fewest tokens from `state` to an accepting one."""
        ids: list[int] = []
        while self.num_tokens[state] > 0:
            ids.append(int(self.next_token[state]))
            after = dfa.walk((state,), vocabulary.tokens[ids[-1]])
            assert after is not None
            state = after[0]
        return ids


@loop("b1(i4[:,::1], i4[:,::1], u1[::1], i4[::1], i4[::1], i4[::1], i8, i8)")
def _relax_tokens(
    nodes: Int32Array,
    table: Int32Array,
    classes: npt.NDArray[np.uint8],
    states: Int32Array,
    num_tokens: Int32Array,
    next_token: Int32Array,
    first: int,
    last: int,
) -> bool:
    """Improve states `first` to `last` once by their tokens, the last state first. -> whether anything changed"""
    far = 2147483647
    changed = False
    for state in range(last - 1, first - 1, -1):
        states[0] = state
        node = 0
        while node < len(nodes):
            depth = nodes[node, 1]
            target = table[states[depth - 1], classes[nodes[node, 0]]]
            if target == 0:
                node = nodes[node, 2]
                continue
            states[depth] = target
            token = nodes[node, 3]
            if token >= 0 and num_tokens[target] != far and num_tokens[target] + 1 < num_tokens[state]:
                num_tokens[state] = num_tokens[target] + 1
                next_token[state] = token
                changed = True
            node += 1
    return changed
