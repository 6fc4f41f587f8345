from __future__ import annotations

import pickle

import numpy as np
import pytest

from graftlm.core.errors import ConfigError
from graftlm.core.prompt_input import PromptInput, Span

CAT, DOG = b"digest of a cat.", b"digest of a dog."


def span(digest: bytes, start: int, stop: int) -> Span:
    return Span(start, stop, digest, {"pixel_values": np.zeros((stop - start, 3))})


def test_a_span_has_negative_ids_that_its_digest_alone_decides() -> None:
    ids = span(CAT, 2, 6).ids
    assert ids.dtype == np.int32 and len(ids) == 4 and (ids < 0).all() and len(set(ids.tolist())) == 4
    assert span(CAT, 7, 9).ids.tolist() == ids[:2].tolist()
    assert not set(span(DOG, 2, 6).ids.tolist()) & set(ids.tolist())


def test_a_prompt_goes_on_with_text_behind_its_spans() -> None:
    one = span(CAT, 1, 3)
    prompt = PromptInput(np.array([5, *one.ids, 6], np.int32), (one,))
    longer = prompt.extended([7, 8])
    assert longer.ids.tolist() == [5, *one.ids, 6, 7, 8] and longer.spans == (one,) and len(longer) == 6
    assert prompt.without_last().ids.tolist() == [5, *one.ids] and prompt.without_last().spans == (one,)
    assert prompt.extended([]) is prompt


@pytest.mark.parametrize("ids", [[5, 1, 2, 6], [5, 6]], ids=["other ids", "too short"])
def test_ids_that_are_not_the_spans_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="1 to 3 are not those of the span"):
        PromptInput(np.array(ids, np.int32), (span(CAT, 1, 3),))


def test_a_prompt_survives_the_way_to_another_process() -> None:
    one = span(CAT, 0, 2)
    there = pickle.loads(pickle.dumps(PromptInput(np.array([*one.ids, 6], np.int32), (one,))))
    assert there.ids.tolist() == [*one.ids, 6] and there.spans[0].digest == CAT
