from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError
from graftlm.core.program.state import ProgramState
from tests.scripted import Scripted


def in_turn(*answers: str) -> Callable[[str], str]:
    rest = list(answers)
    return lambda prompt: rest.pop(0)


def test_vote_appends_the_most_frequent_value() -> None:
    state = gl.vote(3).run("Q: ", runtime=Scripted(in_turn("a", "b", "b")))
    assert state.text == "Q: b"
    assert (state["answer"], state["values"], state["votes"]) == ("b", ["a", "b", "b"], {"a": 1, "b": 2})


def test_votes_can_be_counted_by_another_value_and_ties_go_to_the_first() -> None:
    state = gl.vote(4, gl.gen("x"), by=str.lower).run("Q: ", runtime=Scripted(in_turn("B", "a", "b", "A")))
    assert (state["x"], state["votes"]) == ("B", {"b": 2, "a": 2})


def test_best_of_keeps_the_value_with_the_highest_score() -> None:
    state = gl.best_of(3, len).run("Q: ", runtime=Scripted(in_turn("aa", "aaaa", "a")))
    assert (state["answer"], state["scores"], state.text) == ("aaaa", [2.0, 4.0, 1.0], "Q: aaaa")


def test_a_program_can_be_the_score() -> None:
    @gl.program
    def rate(s: ProgramState, text: str) -> int:
        s += text + "? " + gl.gen("rating", dtype=int)
        return int(s["rating"])

    rule = {"Q: ": "no", "no? ": "2"}
    state = gl.best_of(2, rate).run("Q: ", runtime=Scripted(lambda prompt: rule[prompt]))
    assert (state["answer"], state["scores"]) == ("no", [2.0, 2.0])


def test_beam_keeps_the_best_states_of_each_level() -> None:
    steps = {"Q: ": ["a", "b", "c"], "Q: b": ["d", "x", "e"], "Q: c": ["y", "f", "g"]}
    state = gl.beam(2, 2, lambda text: ord(text[-1]), branch=3).run("Q: ", runtime=Scripted(lambda p: steps[p].pop()))
    assert (state["step"], state["score"], state.text) == (["c", "y"], ord("y"), "Q: cy")
    assert steps == {"Q: ": [], "Q: b": [], "Q: c": []}


def test_chain_of_thought_reasons_before_it_answers() -> None:
    backend = Scripted(in_turn(" It is so.", " yes"))
    state = gl.chain_of_thought().run("Is it?", runtime=backend)
    assert state.text == "Is it?\nLet's think step by step. It is so.\nAnswer: yes"
    assert (state["thought"], state["answer"]) == (" It is so.", " yes")
    assert backend.requests[0].sampling.stop == ("Answer:",)


def test_map_has_a_branch_for_each_item() -> None:
    assert gl.map(["x", "y"]).run("P: ", runtime=Scripted(lambda p: p.upper()))["value"] == ["P: X", "P: Y"]

    def step(branch: ProgramState, item: int) -> None:
        branch += f"{item}" + gl.gen("a") + gl.gen("b")

    state = gl.map(step=step).run("P", items=[1, 2], runtime=Scripted(lambda p: "!"))
    assert (state["a"], state["b"]) == (["!", "!"], ["!", "!"])
    assert gl.map([]).run("P", runtime=Scripted()).text == "P"


def test_a_primitive_continues_the_state_of_another_program() -> None:
    @gl.program
    def asked(s: ProgramState) -> dict[Any, int]:
        s += gl.user("Q")
        with s.assistant():
            votes: dict[Any, int] = gl.vote(2).on(s)
        s += "!"
        return votes

    state = asked.run(runtime=Scripted())
    assert (state.result, state["answer"]) == ({"!": 2}, "!")
    assert state.messages == [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "!"}]


def test_primitives_are_programs_that_pickle_and_run_in_batches() -> None:
    copy = pickle.loads(pickle.dumps(gl.vote(2)))
    states = copy.batch([{"prompt": "A"}, {"prompt": "B"}], runtime=Scripted(lambda p: p))
    assert [state["answer"] for state in states] == ["A", "B"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: gl.vote(0), "n is 0; it must be a whole number, at least 1"),
        (lambda: gl.vote(2, "x"), "'x' asks for nothing; give gl.gen"),
        (lambda: gl.vote(2, gl.gen()), "the gen has no name"),
        (lambda: gl.best_of(2, 3), "score is 3; give a function"),
        (lambda: gl.beam(2, 0, len), "depth is 0"),
        (lambda: gl.map("abc"), "items is 'abc'; give a list"),
        (lambda: gl.vote(2).on("x"), "'x' is no state"),
        (lambda: gl.program(lambda s: None, temperature=0).on(None), "set temperature where it is run"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()
