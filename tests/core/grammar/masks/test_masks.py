"""Masks hold exactly the tokens that the automaton can read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.automata.dfa import Dfa, Place
from graftlm.core.grammar.engines.fsm import FsmGrammar
from graftlm.core.grammar.masks.masks import Masks
from graftlm.core.grammar.masks.self_loops import self_loop
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import Limits
from graftlm.core.grammar.vocabulary import Vocabulary
from tests.core.grammar.automata.test_dfa import COUNTED
from tests.core.grammar.regex.test_parser import PATTERNS
from tests.core.grammar.vocabularies import allowed, allowed_at, bpe_vocabulary, byte_vocabulary, row_at

STRING = r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))%s"'


def readable(dfa: Dfa, vocabulary: Vocabulary, place: Place) -> set[int]:
    """By brute force: each token walked on its own."""
    found = {i for i, token in enumerate(vocabulary.tokens) if token and dfa.walk(place, token) is not None}
    return found | set(vocabulary.eos_token_ids) if dfa.accepting[place[0]] else found


def walk_at_random(dfa: Dfa, vocabulary: Vocabulary, choices: list[int]) -> list[Place]:
    """The places of a random text, token by token."""
    places, place = [dfa.start], dfa.start
    for choice in choices:
        tokens = sorted(readable(dfa, vocabulary, place) - set(vocabulary.eos_token_ids))
        if not tokens:
            break
        after = dfa.walk(place, vocabulary.tokens[tokens[choice % len(tokens)]])
        assert after is not None
        places.append(after)
        place = after
    return places


@settings(max_examples=60)
@given(st.one_of(PATTERNS, COUNTED), st.lists(st.integers(0, 1000), max_size=5))
def test_masks_of_random_patterns_are_what_brute_force_finds(pattern: str, choices: list[int]) -> None:
    vocabulary = bpe_vocabulary()
    try:
        dfa = Dfa.compile(parse(pattern), Limits(states=5_000, seconds=2))
    except GrammarError:
        return
    masks = Masks(dfa, vocabulary)
    for place in walk_at_random(dfa, vocabulary, choices):
        assert allowed_at(masks, place) == readable(dfa, vocabulary, place)


@pytest.mark.parametrize(
    "pattern",
    [
        STRING % "*",
        STRING % "{1,}",
        STRING % "{2,6}",
        STRING % "{0,40}",
        STRING % "{30,}",
        "[a-z]{3,50}",
        "[a-z][a-z0-9_]*",
    ]
    + [r"\w+", r"[a-z ]{9,20}[A-Z]", r"[a-z ]{9,12}[a-z]", r"[a-zé]*[é-ü]{2,30}", r"[a-p]*é?", r"(?i)[a-z]{12}"],
)
@settings(max_examples=8)
@given(choices=st.lists(st.integers(0, 1000), min_size=3, max_size=12))
def test_masks_inside_repeated_classes_are_what_brute_force_finds(pattern: str, choices: list[int]) -> None:
    vocabulary = bpe_vocabulary()
    dfa = Dfa.compile(parse(pattern))
    masks = Masks(dfa, vocabulary)
    for chars in [loop.chars for state in range(1, dfa.num_states) if (loop := self_loop(dfa, state)) is not None]:
        vocabulary.slices.build(chars)  # rather than after some misses
    for place in walk_at_random(dfa, vocabulary, choices):
        assert allowed_at(masks, place) == readable(dfa, vocabulary, place)


NARROW = [
    r"x[a-z]+y",
    r"[a-z]{3,50}",
    r"([a-z]{2,6},)*z",
    r"[A-Za-z0-9]{1,30}-[a-z]*",
    r"\"[a-z]{2,7}\"(,\"[a-z]{2,7}\")*",
]


@pytest.mark.parametrize("pattern", NARROW)
@pytest.mark.parametrize("counters", [True, False])
@settings(max_examples=8)
@given(choices=st.lists(st.integers(0, 1000), min_size=3, max_size=12))
def test_masks_of_few_repeated_characters_are_what_brute_force_finds(
    pattern: str, counters: bool, choices: list[int]
) -> None:
    vocabulary = bpe_vocabulary()
    dfa = Dfa.compile(parse(pattern), counters=counters)
    masks = Masks(dfa, vocabulary)
    longest = vocabulary.trie.max_depth
    loops = [loop for state in range(1, dfa.num_states) if (loop := self_loop(dfa, state, longest)) is not None]
    assert any(loop.exits is not None and not loop.chars.wide_rest for loop in loops)
    for loop in loops:
        vocabulary.slices.build(loop.chars)
    for place in walk_at_random(dfa, vocabulary, choices):
        assert allowed_at(masks, place) == readable(dfa, vocabulary, place)


def test_masks_need_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for loop in jit._loops:
        monkeypatch.setattr(loop, "machine_code", None)
    dfa = Dfa.compile(parse(STRING % "{0,30}"))
    assert allowed_at(Masks(dfa, byte_vocabulary()), dfa.start) == {ord('"')}


def test_places_far_from_their_bounds_share_one_mask() -> None:
    dfa = Dfa.compile(parse(STRING % "{0,4000}"))
    masks = Masks(dfa, byte_vocabulary())
    place = dfa.walk(dfa.start, b'"')
    for _ in range(100):
        assert place is not None
        masks.row(place)
        place = dfa.walk(place, b"x")
    assert len(masks._rows) == 1 and 0 < masks.num_bytes <= 4 * byte_vocabulary().num_words


def test_equal_masks_are_kept_once() -> None:
    dfa = Dfa.compile(parse("(aX|bX|cX|dX)Y"))
    masks = Masks(dfa, byte_vocabulary())
    rows = [masks.row(place) for text in (b"a", b"b", b"c", b"d") if (place := dfa.walk(dfa.start, text))]
    assert all(row is rows[0] for row in rows)


def test_masks_stay_within_their_bytes() -> None:
    dfa = Dfa.compile(parse("".join(f"[{c}{c.upper()}]" for c in "abcdefghij")))
    row_bytes = Masks(dfa, byte_vocabulary()).row(dfa.start)[-1]
    masks = Masks(dfa, byte_vocabulary(), max_bytes=3 * row_bytes)
    for _ in range(2):
        for length in range(10):
            place = dfa.walk(dfa.start, b"abcdefghij"[:length])
            assert place is not None
            letter = "abcdefghij"[length]
            assert allowed_at(masks, place) == {ord(letter), ord(letter.upper())}
            assert masks.num_bytes == sum(row[-1] for row in masks._rows.values()) <= 3 * row_bytes


def test_ids_with_the_same_bytes_are_allowed_together() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"a", b"ab", b"a"], eos_token_id=None)
    grammar = FsmGrammar(Dfa.compile(parse("ab?")), vocabulary)
    assert allowed_at(grammar.masks, grammar.dfa.start) == {0, 2, 3, 4}


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    vocabulary = Vocabulary([b"a", b"b"], vocab_size=70)
    row = row_at(Masks(Dfa.compile(parse("[ab]*")), vocabulary), (1,))
    assert len(row) == 3 and allowed(row) == {0, 1}


def test_end_of_sequence_is_allowed_exactly_where_the_text_is_complete() -> None:
    vocabulary = Vocabulary([b"a", b"b", b"</s>", b"<|end|>"], eos_token_id=[2, 3])
    grammar = FsmGrammar(Dfa.compile(parse("ab*")), vocabulary)
    matcher = grammar.matcher()
    row = np.zeros(vocabulary.num_words, np.int32)
    matcher.fill_mask(row)
    assert allowed(row) == {0}
    matcher.advance([0])
    matcher.fill_mask(row)
    assert allowed(row) == {1, 2, 3}


@pytest.mark.parametrize(
    ("chars", "expected"),
    [('[^"]', {*range(256)} - {*range(0x80, 0xC2), *range(0xF5, 0x100)}), ("[a-z]", {*b'abcdefghijklmnopqrstuvwxyz"'})],
)
def test_a_mask_is_computed_ahead_once_and_only_where_it_takes_long(
    chars: str, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dfa = Dfa.compile(parse(f'name:"{chars}{{0,40}}"'))
    masks, computed = Masks(dfa, byte_vocabulary()), []
    compute = masks._compute
    monkeypatch.setattr(masks, "_compute", lambda place: computed.append(place) or compute(place))
    forced, text = dfa.start, dfa.walk(dfa.start, b'name:"a')
    assert text is not None
    masks.prefetch(forced)
    assert computed == [] and masks._ahead == {}
    for _ in range(3):
        masks.prefetch(text)
    assert allowed_at(masks, text) == expected
    assert computed == [masks.representative(text)]


def test_a_mask_of_which_a_slice_holds_most_is_not_computed_ahead() -> None:
    vocabulary = byte_vocabulary()
    vocabulary.slices.prepare()
    dfa = Dfa.compile(parse(STRING % "*"))
    masks, text = Masks(dfa, vocabulary), dfa.walk(dfa.start, b'"a')
    assert text is not None
    masks.prefetch(text)
    assert masks._ahead == {} and masks._digests == {}
    assert allowed_at(masks, text) == readable(dfa, vocabulary, text)


def test_what_goes_wrong_ahead_is_raised_for_the_row_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dfa = Dfa.compile(parse('"[^"]{0,40}"'))
    masks, go = Masks(dfa, byte_vocabulary()), threading.Event()

    def fail(place: Place) -> None:
        go.wait(120)
        raise MemoryError("no room")

    monkeypatch.setattr(masks, "_compute", fail)
    place = dfa.walk(dfa.start, b'"')
    assert place is not None
    masks.prefetch(place)
    threading.Timer(0.01, go.set).start()
    with pytest.raises(MemoryError, match="no room"):
        masks.row(place)


def test_a_state_of_few_bytes_with_many_tokens_below_them_is_computed_ahead() -> None:
    """After a backslash nine bytes may follow, and after these any text."""
    tokens = [bytes([i]) for i in range(256)] + [b"n" + f"{i:05d}".encode() for i in range(20_000)] + [b""]
    vocabulary = Vocabulary(tokens, eos_token_id=len(tokens) - 1)
    dfa = Dfa.compile(parse(STRING % "*"))
    masks = Masks(dfa, vocabulary)
    escaped = dfa.walk(dfa.start, b'"a\\')
    assert escaped is not None and dfa.degree(escaped[0]) == 9
    masks.prefetch(escaped)
    ahead = masks._ahead.get(masks.representative(escaped))
    assert ahead is not None or masks._known(escaped) is not None
    assert allowed_at(masks, escaped) == readable(dfa, vocabulary, escaped)
    numbers = Dfa.compile(parse("n[0-9]{9}"))
    few = Masks(numbers, vocabulary)
    few.prefetch(numbers.start)
    assert few._ahead == {} and few._digests == {}
