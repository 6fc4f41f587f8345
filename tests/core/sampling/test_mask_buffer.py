"""Masks of one step in one piece of memory, for a model with more or fewer ids than the tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graftlm.core.sampling.step_masks import MaskBuffer

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [None, CPU, *(torch.device("cuda", i) for i in range(torch.cuda.is_available()))])
@pytest.mark.parametrize(("num_words", "filled_words"), [(3, 3), (5, 3), (3, 5)])
@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [1, 3], []])
def test_the_masks_that_are_sent_are_those_that_were_filled(
    device: torch.device | None, num_words: int, filled_words: int, numbers: list[int]
) -> None:
    buffer = MaskBuffer(num_words, filled_words, device)
    for step in range(3):
        for i, row in enumerate(rows := buffer.take(4)):
            row[:] = 10 * i + step
        assert [len(row) for row in rows] == [filled_words] * 4
        places = [2 * number + 1 for number in numbers]
        masks = buffer.masks(numbers, places)
        one = np.zeros(num_words, np.int32)
        one[:filled_words] = 1
        expected = [((10 * number + step) * one).tolist() for number in numbers]
        assert masks.on(device or CPU).tolist() == expected
        assert (list(masks), [masks[place].tolist() for place in places]) == (places, expected)
        assert bool(masks) == bool(numbers)


def test_rows_of_a_larger_step_follow_those_of_a_smaller_one() -> None:
    buffer = MaskBuffer(2, 1, None)
    buffer.take(1)[0][:] = 7
    rows = buffer.take(3)
    for row in rows:
        row[:] = 5
    assert buffer.masks([0, 1, 2], [0, 1, 2]).on(CPU).tolist() == [[5, 0]] * 3


def test_a_step_without_masks_has_none_and_sends_nothing_of_the_step_before() -> None:
    buffer = MaskBuffer(2, 2, None)
    buffer.take(2)
    assert buffer.take(0) == []
    masks = buffer.masks([], [])
    assert not masks and masks.on(CPU).shape == (0, 2)
