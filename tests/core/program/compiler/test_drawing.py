from __future__ import annotations

import re

import graftlm as gl
from bench.compiler._pictures import FOLDER, drawings
from graftlm.core.program.state import ProgramState
from tests.scripted import Scripted


def test_the_pictures_of_the_docs_are_drawn_by_plans() -> None:
    assert {path.stem: path.read_text() for path in FOLDER.glob("*.svg")} == drawings()


def test_a_drawing_has_a_box_for_each_call_and_counts_the_calls_left_out() -> None:
    @gl.program
    def grow(s: ProgramState, levels: int) -> None:
        s += "Q"
        states = [s]
        for _ in range(levels):
            states = [branch for state in states for branch in state.fork(3)]
            for branch in states:
                branch += gl.gen("<x>", max_tokens=2)

    small, large = (grow.plan([{"levels": n}], runtime=Scripted()).svg() for n in (2, 5))
    assert small.count("<rect") == 1 + 3 + 9 and small.count("<path") == 3 + 9 and "&lt;x&gt;" in small
    assert large.count("<rect") == 201 and "and 163 more calls" in large
    places = re.findall(r'<rect x="(\d+)" y="([\d.]+)"', large)
    assert len(set(places)) == len(places)  # no box covers another
