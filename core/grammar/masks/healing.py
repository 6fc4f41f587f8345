"""Forced bytes as tokens, healed: canonical after what is there, and holding back what a longer token could take.

Tokens that a tokenizer would write for the bytes alone are wrong at both ends: the last token so far and the first
forced bytes may belong together, and the last forced bytes may be the beginning of a longer token whose rest the
model chooses. So the last token is encoded again with the bytes, and the end is cut back to the first byte from which
some longer token can still go on. This is llguidance's rule, to the token.
"""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.masks.trie_walk import continues
from graftlm.core.grammar.vocabulary import Vocabulary

_LOOKBACK = 4  # tokens at the end whose bytes a longer token could begin in


def encode_after(vocabulary: Vocabulary, context: Sequence[int], data: bytes) -> list[int]:
    """The canonical ids of `data` where it follows `context`, if that can be without changing the last token."""
    tail = vocabulary.tokens[context[-1]] if len(context) and 0 <= context[-1] < vocabulary.vocab_size else b""
    if tail:
        ids = vocabulary.encode(tail + data)
        if ids[0] == context[-1]:
            return ids[1:]
    return vocabulary.encode(data)


def heal(vocabulary: Vocabulary, dfa: Dfa, after: Place, token_ids: list[int]) -> list[int]:
    """Drop the tokens at the end that a longer token could replace, if what follows comes from `after`."""
    if dfa.is_final(after):
        return token_ids
    trie = vocabulary.trie
    suffix = vocabulary.decode(token_ids[-_LOOKBACK:])[-trie.max_depth :]
    for start in range(len(suffix)):
        node = trie.find(suffix[start:])
        if node >= 0 and continues(trie, node, dfa, after):
            num_held, num_kept = 0, len(token_ids)
            while num_held < len(suffix) - start:
                num_kept -= 1
                num_held += len(vocabulary.tokens[token_ids[num_kept]])
            return token_ids[:num_kept]
    return token_ids
