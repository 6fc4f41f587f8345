"""The engines that this folder measures against, on our vocabularies."""

from __future__ import annotations

from typing import Any

import numpy as np

from graftlm import Vocabulary
from graftlm.core.grammar.matcher import MaskRow


def llguidance_json(schema: str, vocabulary: Vocabulary) -> Any:
    """llguidance's matcher for a JSON schema, compact."""
    from llguidance import LLMatcher

    return _llguidance(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}), vocabulary)


def llguidance_regex(pattern: str, vocabulary: Vocabulary) -> Any:
    """llguidance's matcher for a pattern."""
    from llguidance import LLMatcher

    return _llguidance(LLMatcher.grammar_from_regex(pattern), vocabulary)


def llguidance_mask(matcher: Any, vocabulary: Vocabulary) -> MaskRow:
    row = np.zeros(vocabulary.num_words, np.int32)
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return row


def xgrammar_compiler(vocabulary: Vocabulary) -> Any:
    """xgrammar's compiler, one thread, no cache."""
    import xgrammar

    tokens: list[Any] = [token or b"<|special|>" for token in vocabulary.tokens]
    info = xgrammar.TokenizerInfo(
        tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=list(vocabulary.eos_token_ids)
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def xgrammar_json(compiler: Any, schema: str) -> Any:
    """xgrammar's compiled JSON schema, compact. Raises RuntimeError for a schema that it refuses."""
    return compiler.compile_json_schema(schema, any_whitespace=False, separators=(",", ":"))


def xgrammar_mask(matcher: Any, vocabulary: Vocabulary) -> MaskRow:
    import torch

    row = torch.full((1, vocabulary.num_words), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    mask: MaskRow = row[0].numpy()
    return mask


def _llguidance(source: str, vocabulary: Vocabulary) -> Any:
    from llguidance import LLMatcher

    from graftlm.core.grammar.engines.byte_tokenizer import tokenizer_of

    matcher = LLMatcher(tokenizer_of(vocabulary), source, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher
