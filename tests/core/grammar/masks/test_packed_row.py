"""Mask rows as they are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from graftlm.core.grammar.masks.packed_row import _differences, empty_row, pack, take_back, write

NUM_WORDS = 40
NO_ENDS = np.zeros(0, np.int32)
WORDS = st.integers(-(2**31), 2**31 - 1)


def row_of(words: dict[int, int]) -> np.ndarray:
    row = empty_row(NUM_WORDS)
    assert not row.any()
    for place, word in words.items():
        row[place] = word
    return row


@pytest.mark.parametrize("compiled", [True, False])
@given(
    words=st.dictionaries(st.integers(0, NUM_WORDS - 1), WORDS),
    seed=st.integers(0, 99),
    ends=st.lists(st.integers(0, 32 * NUM_WORDS - 1), max_size=2),
)
def test_what_is_written_is_what_was_packed(compiled: bool, words: dict[int, int], seed: int, ends: list[int]) -> None:
    base = np.random.default_rng(seed).integers(-9, 9, NUM_WORDS, np.int32)
    expected = base.copy()
    for place, word in words.items():
        expected[place] |= word
    for token_id in ends:
        expected[token_id >> 5] |= np.array(1 << (token_id & 31), np.uint32).view(np.int32)
    before, row, found = base.copy(), row_of(words), np.full(NUM_WORDS, 0x55555555, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(_differences, "machine_code", None)
        packed = pack(row, base, np.array(ends, np.int32))
    row_of({0: -1, 7: 5})  # the row it was packed from is used again
    write(packed, found)
    assert (found == expected).all() and packed[-1] <= base.nbytes and (base == before).all()


@pytest.mark.parametrize("filled", [0, -8])
def test_a_row_takes_memory_for_the_words_that_differ(filled: int) -> None:
    base = np.full(NUM_WORDS, filled, np.int32)
    sizes = [pack(row_of(dict.fromkeys(range(n), 5)), base, NO_ENDS)[-1] for n in range(NUM_WORDS)]
    assert sizes[:4] == [0, 12, 24, 36] and max(sizes) == sizes[-1] == 4 * NUM_WORDS


def test_a_row_that_is_not_packed_is_cleared() -> None:
    row = row_of({3: 7})
    take_back(row)
    assert row_of({}) is row
