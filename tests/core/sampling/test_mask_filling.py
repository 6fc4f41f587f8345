"""Masks filled side by side are those filled one after the other, and what one matcher raises stays its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.masks import workers
from graftlm.core.sampling.step_masks import MaskJob, fill
from tests.grammars import BYTES, compiled

OPEN = {"type": "object", "properties": {"a": {}, "b": {"type": "string"}}}


def _jobs(texts: list[str]) -> list[MaskJob]:
    grammar, jobs = compiled(OPEN, strict=False, engine="llguidance"), []
    assert grammar.engine == "llguidance"
    for place, text in enumerate(texts):
        matcher = grammar.matcher()
        assert matcher.advance(list(text.encode())) == len(text)
        jobs.append(MaskJob(place, matcher, np.zeros(BYTES.num_words, np.int32)))
    return jobs


def test_rows_that_a_library_fills_are_equal_wherever_they_are_filled() -> None:
    texts = ["", "{", '{"a', '{"a":[1', '{"b":"', '{"b":"x"', '{"a":1}', '{"c":{"d":nul', '{"a":-', '{"a":1,"b":"']
    jobs, alone = _jobs(texts), _jobs(texts)
    assert fill(jobs) == {job.place: job.matcher.fill_mask(job.row) for job in alone}
    assert [job.row.tolist() for job in jobs] == [job.row.tolist() for job in alone]


def test_what_a_row_held_before_is_gone() -> None:
    class Adding:
        def fill_mask(self, row: Any) -> bool:
            row[0] |= 4
            return True

    jobs = [MaskJob(place, Adding(), np.full(2, 3, np.int32)) for place in range(2)]  # type: ignore[arg-type]
    assert fill(jobs) == {0: True, 1: True}
    assert [job.row.tolist() for job in jobs] == [[4, 0], [4, 0]]


def test_they_are_filled_on_several_threads() -> None:
    used: set[int] = set()
    met = threading.Barrier(2)

    class Meeting:
        fills_outside_lock = True

        def fill_mask(self, row: Any) -> bool:
            if threading.get_ident() not in used:
                used.add(threading.get_ident())
                if len(used) <= 2:
                    met.wait(120)
            return True

    jobs = [MaskJob(place, Meeting(), np.zeros(1, np.int32)) for place in range(6)]  # type: ignore[arg-type]
    assert workers.masks.count >= 1
    assert fill(jobs) == dict.fromkeys(range(6), True)
    assert len(used) == 2


def test_what_a_matcher_raises_is_the_error_of_its_own_row() -> None:
    class Broken:
        fills_outside_lock = True

        def fill_mask(self, row: Any) -> bool:
            raise GrammarError("gave up")

    jobs = _jobs(["{"] * 8)
    jobs[3] = MaskJob(3, Broken(), jobs[3].row)  # type: ignore[arg-type]
    filled = fill(jobs)
    assert isinstance(filled.pop(3), GrammarError)
    assert filled == dict.fromkeys([0, 1, 2, 4, 5, 6, 7], True)
