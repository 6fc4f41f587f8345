"""Finding where the end of a text stood before."""

import numpy as np
from hypothesis import given, strategies as st

from graftlm.core.scheduling.ngram_lookup import PARTING, Match, Recent, find


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_longest_end_is_found_where_it_stands_last() -> None:
    text = ids(7, 1, 2, 3, 4, 9, 1, 2, 3, 5, 2, 3)
    assert find(text[:-1], text, 6) == Match(stop=9, length=2)
    assert find(ids(9, 2, 3, 8, 1, 2, 3, 6), ids(1, 2, 3), 6) == Match(stop=7, length=3)


def test_no_more_than_the_wanted_tokens_are_compared() -> None:
    assert find(ids(1, 2, 3, 8, 9, 3, 4), ids(1, 2, 3), 1) == Match(stop=6, length=1)


def test_a_token_that_was_never_there_is_not_found() -> None:
    assert find(ids(1, 2, 3), ids(1, 2, 4), 6) is None
    assert find(ids(), ids(4), 6) is None


tokens = st.lists(st.integers(0, 3), max_size=30)


@given(tokens, tokens.filter(len), st.integers(1, 8))
def test_it_finds_what_looking_at_every_place_finds(text: list[int], tail: list[int], most: int) -> None:
    best = None
    for stop in range(1, len(text) + 1):
        length = 0
        while length < min(stop, len(tail), most) and text[stop - 1 - length] == tail[-1 - length]:
            length += 1
        if length and (best is None or length >= best.length):
            best = Match(stop, length)
    assert find(ids(*text), ids(*tail), most) == best


def test_what_was_written_last_stays_and_the_older_half_goes() -> None:
    recent = Recent(size=12)
    for first in (10, 20, 30, 40):
        recent.add(ids(first, first + 1, first + 2))
    assert recent.ids.tolist() == [22, PARTING, 30, 31, 32, PARTING, 40, 41, 42, PARTING]
    assert recent.after(recent.ids.tolist().index(41), 9).tolist() == [41, 42]


def test_a_text_longer_than_the_room_keeps_its_end() -> None:
    recent = Recent(size=12)
    recent.add(ids(*range(40)))
    assert recent.ids.tolist() == [35, 36, 37, 38, 39, PARTING]
