"""Healed forced tokens: forced bytes as the tokens that the tokenizer would write for the finished text.

Encoding the forced bytes alone goes wrong at both ends. The last token of the context and the first forced bytes may
merge into one token, so the last token is encoded again together with them. The last forced bytes may begin a longer
token whose rest the model chooses, so tokens are held back from the first byte at which a longer token that the grammar
allows could start. This is llguidance's rule for `compute_ff_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.masks.trie_walk import first_continued
from graftlm.core.grammar.vocabulary import Vocabulary

LOOKBACK = 4
"""Tokens at the end of a text among which a longer one may begin."""


def encode_after(vocabulary: Vocabulary, context: Sequence[int], data: bytes) -> list[int]:
    """The canonical ids of `data` after `context`; those of `data` alone where the last token would change."""
    tail = vocabulary.tokens[context[-1]] if len(context) and 0 <= context[-1] < vocabulary.vocab_size else b""
    if tail:
        ids = vocabulary.encode(tail + data)
        if ids[0] == context[-1]:
            return ids[1:]
    return vocabulary.encode(data)


def heal(vocabulary: Vocabulary, dfa: Dfa, after: Place, token_ids: list[int]) -> list[int]:
    """Drop the last tokens that a longer token could replace, given that the text goes on from `after`."""
    if dfa.is_final(after):
        return token_ids
    suffix = last_bytes(vocabulary, token_ids)
    start = first_continued(vocabulary.trie, suffix, dfa, after)
    return token_ids if start < 0 else without_last(vocabulary, token_ids, len(suffix) - start)


def last_bytes(vocabulary: Vocabulary, token_ids: list[int]) -> bytes:
    """The bytes among which a longer token may begin."""
    return vocabulary.decode(token_ids[-LOOKBACK:])[-vocabulary.trie.max_depth :]


def without_last(vocabulary: Vocabulary, token_ids: list[int], num_bytes: int) -> list[int]:
    """The tokens before the last ones, which have at least `num_bytes` bytes."""
    num_held, num_kept = 0, len(token_ids)
    while num_held < num_bytes:
        num_kept -= 1
        num_held += len(vocabulary.tokens[token_ids[num_kept]])
    return token_ids[:num_kept]
