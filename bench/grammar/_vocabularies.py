"""Vocabularies of real size, from the rank files that litellm installs. Nothing is downloaded.

Byte-pair ranks are ordered, so the first part of a rank file is itself a smaller tokenizer.
"""

from __future__ import annotations

import base64
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from graftlm import Vocabulary

# The splitting rule of the newer files, without the possessive repeats that make no difference to what it matches.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FILES = {
    "32k": ("9b5ad71b2ce5302211f9c61530b329a4922fc6a4", 31_999),
    "128k": ("fb374d419588a4632f3f557e76b4b70aebbca790", 127_999),
}


@cache
def encoding(name: str) -> Any:
    """Return the tiktoken encoding of "32k" or "128k"; its last id ends a text."""
    import tiktoken

    file, size = _FILES[name]
    spec = importlib.util.find_spec("litellm")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "litellm_core_utils" / "tokenizers" / file
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines()[:size]:
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding(name, pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": size})


@cache
def vocabulary(name: str) -> Vocabulary:
    """Return a vocabulary of 32,000 or 128,000 tokens with its canonical encoding."""
    encoder = encoding(name)
    tokens = [encoder.decode_single_token_bytes(i) for i in range(encoder.n_vocab - 1)]
    return Vocabulary([*tokens, b""], eos_token_id=encoder.n_vocab - 1, encode=encoder.encode_ordinary)
