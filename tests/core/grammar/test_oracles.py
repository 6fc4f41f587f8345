"""The native engine against xgrammar (equal masks) and llguidance (equal forced tokens, masks within ours)."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import xgrammar
from llguidance import LLMatcher, LLTokenizer, hf as llguidance_hf, numpy as llguidance_numpy

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.regex.parser import parse
from tests.core.grammar.vocabularies import allowed, bpe_tokenizer, bpe_vocabulary

REGEXES = [
    "[a-z]{3}-[0-9]{4}",
    r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    "(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"\+1 \([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    "((25[0-5]|1?[0-9]?[0-9])\\.){3}(25[0-5]|1?[0-9]?[0-9])",
    "(northwest|northeast|southwest|southeast|unknown)",
    r'\{"name":"[^"\\\x00-\x1f]*","age":(0|[1-9][0-9]*),"active":(true|false),"role":("admin"|"user"|"guest")\}',
    r'\{"order_id":"[^"\\\x00-\x1f]{1,30}","tags":\[("[a-z]{1,12}"(,"[a-z]{1,12}")*)?\],"paid":(true|false)\}',
    "(größe|größer|名前|😀+)",
    "a{0,50}b{12,}",
]


@cache
def llguidance_tokenizer() -> LLTokenizer:
    return llguidance_hf.from_tokenizer(bpe_tokenizer(), n_vocab=bpe_vocabulary().vocab_size)


@cache
def xgrammar_compiler() -> Any:
    vocabulary = bpe_vocabulary()
    tokens = [token or b"<eos>" for token in vocabulary.tokens]
    info = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[*vocabulary.eos_token_ids])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def oracle_mask(matcher: Any) -> set[int]:
    """What llguidance or xgrammar allow next."""
    vocabulary = bpe_vocabulary()
    if isinstance(matcher, LLMatcher):
        rows = llguidance_numpy.allocate_token_bitmask(1, vocabulary.vocab_size)
        llguidance_numpy.fill_next_token_bitmask(matcher, rows, 0)
        return allowed(rows[0])
    bitmask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    matcher.fill_next_token_bitmask(bitmask, 0)
    return {i for i in allowed(bitmask.numpy()[0]) if i < vocabulary.vocab_size}


@pytest.mark.parametrize("pattern", REGEXES)
def test_masks_on_random_walks_are_those_of_xgrammar(pattern: str) -> None:
    vocabulary, draw = bpe_vocabulary(), random.Random(pattern)
    grammar = FsmGrammar(Dfa.compile(parse(pattern)), vocabulary)
    compiled = xgrammar_compiler().compile_regex(pattern)
    row = np.zeros(vocabulary.num_words, np.int32)
    for _ in range(4):
        ours, theirs = grammar.matcher(), xgrammar.GrammarMatcher(compiled)
        for _ in range(40):
            ours.fill_mask(row)
            tokens = allowed(row)
            assert tokens == oracle_mask(theirs)
            token_id = draw.choice(sorted(tokens))
            assert ours.advance([token_id]) == 1 and theirs.accept_token(token_id)
            if token_id in vocabulary.eos_token_ids:
                break


@pytest.mark.parametrize("pattern", REGEXES)
def test_forced_tokens_on_random_walks_are_those_of_llguidance(pattern: str) -> None:
    vocabulary, draw = bpe_vocabulary(), random.Random(pattern)
    grammar = FsmGrammar(Dfa.compile(parse(pattern)), vocabulary)
    row = np.zeros(vocabulary.num_words, np.int32)
    for _ in range(4):
        ours, theirs = grammar.matcher(), LLMatcher(llguidance_tokenizer(), LLMatcher.grammar_from_regex(pattern))
        context: list[int] = []
        while len(context) < 60 and not ours.finished:
            forced = ours.forced(context)
            assert forced == theirs.compute_ff_tokens()
            ours.fill_mask(row)
            # while tokens are forced, llguidance allows only the first of them
            assert oracle_mask(theirs) <= allowed(row)
            if not forced:
                assert oracle_mask(theirs) == allowed(row)
            next_ids = forced or [draw.choice(sorted(allowed(row) - set(vocabulary.eos_token_ids)))]
            assert ours.advance(next_ids) == len(next_ids)
            assert all(theirs.consume_token(token_id) for token_id in next_ids)
            context += next_ids


@pytest.mark.parametrize(
    "text",
    ['{"name":"Ada","age":36,"active":true,"role":"admin"}', '{"name":"é😀 x","age":0,"active":false,"role":"guest"}'],
)
def test_a_text_written_with_forced_tokens_has_canonical_tokens(text: str) -> None:
    vocabulary = bpe_vocabulary()
    canonical = vocabulary.encode(text.encode())
    matcher = FsmGrammar(Dfa.compile(parse(REGEXES[6])), vocabulary).matcher()
    ids: list[int] = []
    num_forced = 0
    while not matcher.finished:
        forced = matcher.forced(ids)
        num_forced += len(forced)
        ids += forced or [canonical[len(ids)]]
        assert ids == canonical[: len(ids)]
        matcher.advance(ids[-max(len(forced), 1) :])
    assert vocabulary.decode(ids) == text.encode()
    assert num_forced > len(ids) // 4
