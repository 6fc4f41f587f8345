"""xgrammar as an engine, for those who have it: `Grammar.compile(..., engine="xgrammar")`.

xgrammar reads schemas and patterns leniently: what it does not know it leaves out. So it is given neither, but what
our own reader made of them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError, GrammarError
from graftlm.core.grammar.compile import Grammar, language_of
from graftlm.core.grammar.engines.ebnf import to_ebnf
from graftlm.core.grammar.masks.healing import encode_after
from graftlm.core.grammar.matcher import MaskRow
from graftlm.core.grammar.spec import Options, Spec
from graftlm.core.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher

_MAX_COMPILERS = 4
_LOOKBACK = 4

_compilers: OrderedDict[str, GrammarCompiler] = OrderedDict()
_lock = threading.Lock()


def compile_xgrammar(spec: Spec, vocabulary: Vocabulary, options: Options) -> Grammar:
    """Compile with xgrammar. Raises ConfigError when it is not installed, GrammarError for what it cannot take."""
    language = language_of(spec, options)
    try:
        compiler = _compiler(vocabulary)
        compiled = compiler.compile_grammar(to_ebnf(language.node, language.rules))
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


class XgrammarMatcher:
    """One sequence: see `graftlm.core.grammar.matcher.Matcher`.

    Forced tokens are healed without asking the grammar, so a few less are forced than could be. There is no search
    for endings but for what is forced.
    """

    __slots__ = ("_matcher", "_num_consumed", "_stopped", "_vocabulary")

    def __init__(self, matcher: GrammarMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_consumed = 0
        self._stopped = False

    def fill_mask(self, row: MaskRow) -> bool:
        import torch

        row[:] = 0 if self._stopped else -1
        if self._stopped:
            return True
        needed = self._matcher.fill_next_token_bitmask(torch.from_numpy(row.reshape(1, -1)), 0)
        tail = self._vocabulary.vocab_size & 31
        if tail:  # bits beyond the vocabulary come back set
            row.view(np.uint32)[-1] &= np.uint32((1 << tail) - 1)
        return bool(needed)

    def advance(self, token_ids: Sequence[int]) -> int:
        for num_consumed, token_id in enumerate(token_ids):
            if self._stopped or not self._take(int(token_id)):
                return num_consumed
        return len(token_ids)

    def _take(self, token_id: int) -> bool:
        if token_id in self._vocabulary.eos_token_ids:
            self._stopped = self.accepting
            return self._stopped
        if not (0 <= token_id < self._vocabulary.vocab_size and self._vocabulary.tokens[token_id]):
            return False
        if not self._matcher.accept_token(token_id):
            return False
        self._num_consumed += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        total = self._num_consumed + self._stopped
        if not 0 <= num_tokens <= total:
            raise ValueError(f"cannot undo {num_tokens} tokens; {total} were consumed")
        if self._stopped and num_tokens:
            self._stopped = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._num_consumed -= num_tokens

    def fork(self) -> XgrammarMatcher:
        twin = XgrammarMatcher(self._matcher.fork(), self._vocabulary)
        twin._num_consumed, twin._stopped = self._num_consumed, self._stopped
        return twin

    def forced(self, context: Sequence[int]) -> list[int]:
        data = self.forced_bytes()
        if not data:
            return []
        ids = encode_after(self._vocabulary, context, data)
        return ids if self._ends_after(ids) else self._heal(ids)

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
    def accepting(self) -> bool:
        return self._stopped or bool(self._matcher.is_completed())

    @property
    def finished(self) -> bool:
        if self._stopped:
            return True
        if not self.accepting:
            return False
        row = np.zeros(self._vocabulary.num_words, np.int32)
        if not self.fill_mask(row):
            return False
        for token_id in self._vocabulary.eos_token_ids:
            row.view(np.uint32)[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
        return not row.any()

    @property
    def state(self) -> int | None:
        return None

    def _ends_after(self, ids: list[int]) -> bool:
        taken = self.advance(ids)
        ends = taken == len(ids) and self.finished
        self.rollback(taken)
        return ends

    def _heal(self, ids: list[int]) -> list[int]:
        """Drop the tokens at the end whose bytes begin some longer token."""
        trie = self._vocabulary.trie
        kept = list(ids)
        suffix = self._vocabulary.decode(ids[-_LOOKBACK:])
        for start in range(len(suffix)):
            node = trie.find(suffix[start:])
            if node >= 0 and trie.nodes[node, 2] > node + 1:
                num_held = 0
                while num_held < len(suffix) - start:
                    num_held += len(self._vocabulary.tokens[kept.pop()])
                return kept
        return kept


def _compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    import xgrammar

    with _lock:
        key = vocabulary.fingerprint
        if key not in _compilers:
            # xgrammar takes ids without bytes for special ones
            tokens: list[Any] = list(vocabulary.tokens)
            info = xgrammar.TokenizerInfo(
                tokens,
                vocab_type=xgrammar.VocabType.RAW,
                vocab_size=vocabulary.vocab_size,
                stop_token_ids=list(vocabulary.eos_token_ids),
            )
            _compilers[key] = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
            while len(_compilers) > _MAX_COMPILERS:
                _compilers.popitem(last=False)
        _compilers.move_to_end(key)
        return _compilers[key]
