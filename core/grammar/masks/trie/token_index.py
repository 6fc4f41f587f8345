"""The tokens of a vocabulary in the order of their bytes, and the trie over them; kept on disk by fingerprint.

Building takes about a second for 128k tokens, reading it back a few hundredths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from graftlm.core.grammar.masks.trie.trie import SortedTokens, Trie
from graftlm.kernels import disk_cache

_FORMAT = 1
_FEWEST_TOKENS = 4096
"""Smaller vocabularies are indexed in milliseconds and not kept."""
_KEPT = 16


@dataclass(frozen=True, eq=False)
class TokenIndex:
    tokens: SortedTokens
    trie: Trie

    @classmethod
    def of(cls, tokens: Sequence[bytes], fingerprint: str) -> TokenIndex:
        """The index of `tokens`, from disk where it is kept there under `fingerprint`."""
        folder = disk_cache.private_folder("vocabularies") if len(tokens) >= _FEWEST_TOKENS else None
        path = folder / f"{fingerprint}-{_FORMAT}.npz" if folder is not None else None
        found = disk_cache.load_arrays(path) if path is not None else None
        if found is not None:
            kept = SortedTokens(**{field.name: found[field.name] for field in fields(SortedTokens)})
            return cls(kept, Trie.of(found["nodes"], found["twins"]))
        ordered = SortedTokens.of(tokens)
        index = cls(ordered, Trie.build(ordered))
        if path is not None:
            disk_cache.save_arrays(path, {**vars(ordered), "nodes": index.trie.nodes, "twins": index.trie.twins})
            disk_cache.trim(path.parent, _KEPT)
        return index
