"""Mask rows as they are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from graftlm.core.grammar.masks.rows.packed_row import pack, write

NUM_WORDS = 40
WORDS = st.integers(-(2**31), 2**31 - 1)


def row_of(words: dict[int, int], base: np.ndarray) -> np.ndarray:
    row = base.copy()
    for place, word in words.items():
        row[place] = word
    return row


@given(words=st.dictionaries(st.integers(0, NUM_WORDS - 1), WORDS), seed=st.integers(0, 99))
def test_what_is_written_is_what_was_packed(words: dict[int, int], seed: int) -> None:
    base = np.random.default_rng(seed).integers(-9, 9, NUM_WORDS, np.int32)
    row, found = row_of(words, base), np.full(NUM_WORDS, 0x55555555, np.int32)
    packed = pack(row, base)
    expected = row.copy()
    row[:] = 7  # the row it was packed from is used again
    write(packed, found)
    assert (found == expected).all() and packed[-1] <= row.nbytes


@pytest.mark.parametrize("filled", [0, -1])
def test_a_row_takes_memory_for_the_words_that_differ(filled: int) -> None:
    base = np.full(NUM_WORDS, filled, np.int32)
    sizes = [pack(row_of(dict.fromkeys(range(n), 5), base), base)[-1] for n in range(NUM_WORDS)]
    assert sizes[:4] == [0, 12, 24, 36] and max(sizes) == sizes[-1] == 4 * NUM_WORDS
