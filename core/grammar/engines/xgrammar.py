"""xgrammar as an engine, for those who have it: `Grammar.compile(..., engine="xgrammar")`.

xgrammar reads schemas and patterns leniently: what it does not know it leaves out. So it is given neither, but what
our own reader made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.compile import Grammar, language_of
from graftlm.core.grammar.engines.ebnf import to_ebnf
from graftlm.core.grammar.engines.library import LibraryMatcher, PerVocabulary, allow_eos, clear_beyond
from graftlm.core.grammar.masks.healing import encode_after, last_bytes, without_last
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.spec import Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher


def compile_xgrammar(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile with xgrammar. Raises ConfigError when it is not installed, GrammarError for what it cannot take."""
    language = language_of(spec, options, token_rules=True)
    try:
        compiled = _compiler(vocabulary).compile_grammar(to_ebnf(language.node, language.rules))
    except ImportError as error:
        raise ConfigError("the engine 'xgrammar' needs the package xgrammar; install it or choose another") from error
    except RuntimeError as error:
        raise GrammarError(f"xgrammar cannot compile the constraint: {str(error).splitlines()[0]}") from error
    return Grammar("xgrammar", XgrammarGrammar(compiled, vocabulary), language.issues)


class XgrammarGrammar:
    """A grammar compiled by xgrammar for one vocabulary."""

    def __init__(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._compiled = compiled
        self.vocabulary = vocabulary

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> XgrammarMatcher:
        from xgrammar import GrammarMatcher

        return XgrammarMatcher(GrammarMatcher(self._compiled), self.vocabulary)


class XgrammarMatcher(LibraryMatcher):
    """One sequence: see `graftlm.core.grammar.matcher.Matcher`.

    Forced tokens are healed without asking the grammar, so slightly fewer tokens are forced than could be. The only
    endings found are forced ones.
    """

    __slots__ = ()

    _matcher: GrammarMatcher

    def fill_mask(self, row: MaskRow) -> bool:
        import torch

        row[:] = 0 if self._stopped else -1
        if self._stopped:
            return True
        needed = self._matcher.fill_next_token_bitmask(torch.from_numpy(row.reshape(1, -1)), 0)
        clear_beyond(row, self._vocabulary)
        return bool(needed)

    def _consume(self, token_ids: list[int]) -> int:
        return next(
            (i for i, token_id in enumerate(token_ids) if not self._matcher.accept_token(token_id)), len(token_ids)
        )

    def _copy(self) -> GrammarMatcher:
        return self._matcher.fork()

    def _accepts(self) -> bool:
        return bool(self._matcher.is_completed())

    def forced(self, context: Sequence[int]) -> list[int]:
        data = self.forced_bytes()
        if not data:
            return []
        ids = encode_after(self._vocabulary, context, data)
        if self._ends_after(ids):
            return ids
        suffix = last_bytes(self._vocabulary, ids)
        start = self._vocabulary.trie.first_begun(suffix)
        return ids if start is None else without_last(self._vocabulary, ids, len(suffix) - start)

    def forced_bytes(self) -> bytes:
        if self._stopped or self.accepting:
            return b""
        try:
            return self._matcher.find_jump_forward_string().encode()
        except UnicodeDecodeError:  # inside a character
            return b""

    def min_tokens_to_accept(self) -> int:
        return len(self.ending([]))

    def ending(self, context: Sequence[int]) -> list[int]:
        """What is forced, if it ends the text; else []."""
        if self.accepting:
            return []
        ids = self._vocabulary.encode(self.forced_bytes())
        return ids if self._ends_after(ids) else []

    @property
    def finished(self) -> bool:
        if self._stopped:
            return True
        if not self.accepting:
            return False
        row = np.zeros(self._vocabulary.num_words, np.int32)
        if not self.fill_mask(row):
            return False
        allow_eos(row, self._vocabulary, False)
        return not row.any()

    def _ends_after(self, ids: list[int]) -> bool:
        taken = self.advance(ids)
        ends = taken == len(ids) and self.finished
        self.rollback(taken)
        return ends


def _build_compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    import xgrammar

    tokens: list[Any] = list(vocabulary.tokens)  # xgrammar takes ids without bytes for special ones
    info = xgrammar.TokenizerInfo(
        tokens,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=list(vocabulary.eos_token_ids),
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


_compiler = PerVocabulary(_build_compiler)
