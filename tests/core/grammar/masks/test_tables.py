"""Device tables step and mask as matchers do."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.masks.tables import GrammarTables, TokenTables
from graftlm.core.grammar.regex.regex import parse
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.vocabularies import allowed, bpe_vocabulary


def test_tokens_are_laid_out_by_byte_position() -> None:
    tables = TokenTables.of(Vocabulary([b"ab", b"c", b""], eos_token_id=2))
    assert tables.bytes.tolist() == [[97, 99, 0], [98, 0, 0]]
    assert tables.lengths.tolist() == [2, 1, 0]
    assert tables.eos.tolist() == [2]


@pytest.mark.parametrize(
    "pattern", ['{"a":"[^"]*","b":(true|false)}', "[a-zé]{2,30}x[0-9]{1,3}", "(größe|größer|😀+)?"]
)
def test_tables_step_and_mask_as_the_matcher_does(pattern: str) -> None:
    vocabulary, draw = bpe_vocabulary(), random.Random(pattern)
    grammar = FsmGrammar(Dfa.compile(parse(pattern)), vocabulary)
    tables = GrammarTables.of(grammar, TokenTables.of(vocabulary))
    matchers = [grammar.matcher() for _ in range(3)]
    states = torch.zeros(3, dtype=torch.int32)
    row = np.zeros(vocabulary.num_words, np.int32)
    for _ in range(10):
        logits = torch.zeros(3, vocabulary.vocab_size)
        tables.mask_logits(logits, states)
        assert torch.equal(tables.walk(states), logits == 0)
        token_ids = []
        for matcher, kept in zip(matchers, logits == 0, strict=True):
            matcher.fill_mask(row)
            assert allowed(row) == set(kept.nonzero().flatten().tolist())
            token_ids.append(draw.choice(sorted(allowed(row))))
            if token_ids[-1] not in vocabulary.eos_token_ids:  # which leaves the state as it is
                matcher.advance(token_ids[-1:])
        states = tables.advance(states, torch.tensor(token_ids))
        assert (states >= 0).all()


def test_a_token_that_is_not_allowed_leads_nowhere_and_stays_there() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"</s>"], eos_token_id=2)
    tables = GrammarTables.of(FsmGrammar(Dfa.compile(parse("ab*")), vocabulary), TokenTables.of(vocabulary))
    states = torch.zeros(3, dtype=torch.int32)
    states = tables.advance(states, torch.tensor([0, 1, 2]))
    assert states.tolist() == [1, -1, -1]
    assert tables.advance(states, torch.tensor([2, 0, 0])).tolist() == [1, -1, -1]


def test_counters_that_multiply_out_to_too_many_states_are_refused() -> None:
    vocabulary = bpe_vocabulary()
    grammar = FsmGrammar(Dfa.compile(parse('"[^"]{0,4000}"')), vocabulary)
    with pytest.raises(GrammarError, match="more than 1,000 states"):
        GrammarTables.of(grammar, TokenTables.of(vocabulary), max_states=1_000)
