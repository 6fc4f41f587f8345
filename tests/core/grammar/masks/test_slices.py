"""Slices of a large vocabulary are built by a thread, beside walks of the whole trie."""

from __future__ import annotations

import os
import threading
import time

import pytest

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.masks import slices
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.masks.slices import JSON_STRING, CharClass, Slice, Slices
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.vocabularies import allowed_at, bpe_vocabulary

LETTERS = CharClass(*[bytes(97 <= byte <= 122 for byte in range(128))] * 2, False, False)
QUOTE = bytes(byte in b'"' for byte in range(128))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Vocabulary:
    """A vocabulary of its own that counts as large."""
    monkeypatch.setattr(slices, "_QUICK", 0)
    return Vocabulary(bpe_vocabulary().tokens)


def _slices(vocabulary: Vocabulary) -> Slices:
    return Slices(vocabulary._indexed().tokens, vocabulary.vocab_size)


def _await(found: Slices, chars: CharClass, exits: bytes | None) -> None:
    until_s = time.monotonic() + 60
    while not found.has(chars, exits):
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize("exits", [QUOTE, None])
def test_nobody_waits_while_a_slice_is_built(
    large: Vocabulary, monkeypatch: pytest.MonkeyPatch, exits: bytes | None
) -> None:
    go, threads = threading.Event(), []
    of_slice = Slice.__init__

    def build(self: Slice, *args: object) -> None:
        threads.append(threading.get_ident())
        assert go.wait(60)
        of_slice(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Slice, "__init__", build)
    found = _slices(large)
    try:
        assert all(found.get(JSON_STRING, exits) is None for _ in range(20))
    finally:
        go.set()
    _await(found, JSON_STRING, exits)
    assert found.get(JSON_STRING, exits) is not None
    assert len(threads) == 1 and threads[0] != threading.get_ident()


def test_a_rare_class_gets_a_slice_after_some_misses(large: Vocabulary) -> None:
    found = _slices(large)
    for _ in range(slices._MISSES):
        assert found.get(LETTERS, QUOTE) is None and not found._under_way
    assert found.get(LETTERS, QUOTE) is None
    _await(found, LETTERS, QUOTE)
    assert not found.has(LETTERS, None)  # what leaves it by any byte was not asked for


def test_counted_misses_are_bounded(large: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "_MAX_MISSES", 10)
    found = _slices(large)
    for number in range(100):
        flags = bytes(byte == number for byte in range(128))
        assert found.get(CharClass(flags, flags, False, False), None) is None
    assert len(found._misses) <= 10


def test_a_build_of_another_process_is_begun_again(large: Vocabulary) -> None:
    found = _slices(large)
    found._under_way[JSON_STRING, QUOTE] = os.getpid() + 1
    assert found.get(JSON_STRING, QUOTE) is None
    _await(found, JSON_STRING, QUOTE)


@pytest.mark.parametrize("pattern", [r'"[a-z]{2,9}"', r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"', r"[a-z ]{9,20}[A-Z]"])
def test_masks_are_the_same_before_and_after(large: Vocabulary, pattern: str) -> None:
    dfa = Dfa.compile(parse(pattern))
    places = [(state, *dfa.start[1:]) for state in range(1, dfa.num_states)]
    before = [allowed_at(Masks(dfa, large), place) for place in places for _ in range(3)]
    until_s = time.monotonic() + 60
    while large.slices._under_way:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert large.slices._slices
    assert [allowed_at(Masks(dfa, large), place) for place in places for _ in range(3)] == before
