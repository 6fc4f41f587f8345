from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError, EngineError
from graftlm.core.program.state import ProgramState
from graftlm.core.request import Usage
from tests.chat_templates import LLAMA_2
from tests.models import byte_tokenizer
from tests.scripted import Scripted


def run(function: Any, backend: Scripted | None = None, **arguments: Any) -> ProgramState:
    return gl.program(function).run(runtime=backend or Scripted(), **arguments)


def count_up(prompt: str) -> str:
    """Answers with the number of answers so far."""
    return str(prompt.count("#"))


# -- reading and appending -----------------------------------------------------------------------------------------


def test_text_and_answers_follow_each_other() -> None:
    def program(s: ProgramState) -> None:
        s += "a#" + gl.gen("x") + "b##" + gl.gen("y") + "!"

    state = run(program, Scripted(count_up))
    assert state.text == "a#1b##3!"
    assert (state["x"], state["y"], state.variables) == ("1", "3", {"x": "1", "y": "3"})
    assert state.error is None and state.usage == Usage(prompt_tokens=2 + 6, completion_tokens=2)


def test_appending_returns_before_the_answer_is_there() -> None:
    backend = Scripted(held=True)

    def program(s: ProgramState) -> str:
        s += "a" + gl.gen("x")
        return "returned"

    state = run(program, backend)
    assert state.result == "returned" and "x" in state
    backend.release()
    assert state["x"] == "!"


def test_a_read_from_outside_waits_for_the_program_to_come_to_the_variable() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x")
        s += s["x"] + gl.gen("y")

    assert run(program)["y"] == "!"


def test_each_prompt_continues_the_tokens_of_the_one_before() -> None:
    backend = Scripted(tokenizer=byte_tokenizer(merges=[("a", "b"), ("!", "c"), ("!", "!")]))

    def program(s: ProgramState) -> None:
        s += "xa"
        s += "b" + gl.gen() + "!c" + gl.gen()

    run(program, backend).wait()
    first, second = (request.prompt.ids for request in backend.requests)
    ab = backend.tokenizer.encode("ab")[0]
    assert first.tolist() == [ord("x"), ab]  # texts in a row are cut into tokens together
    assert second[: len(first)].tolist() == first.tolist()
    assert backend.prompts[1] == "xab!!c"
    assert second[len(first)] == ord("!")  # and the generated token stays as it was


def test_a_name_nobody_defines_is_told_with_the_known_ones() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x")

    state = run(program)
    with pytest.raises(KeyError, match=r"no variable 'y'; known: x"):
        state["y"]
    assert state.get("y", 3) == 3


def test_a_program_that_reads_an_unknown_name_fails_at_once() -> None:
    def program(s: ProgramState) -> None:
        s["nothing"]

    assert isinstance(run(program).error, KeyError)


def test_set_gives_a_value_to_a_name() -> None:
    def program(s: ProgramState) -> None:
        s.set("x", [1, 2])
        s["y"] = s["x"][0]

    state = run(program)
    assert (state["x"], state["y"]) == ([1, 2], 1)


def test_a_scope_keeps_the_text_of_its_block() -> None:
    def program(s: ProgramState) -> None:
        s += "before "
        with s.scope("part"):
            s += "a" + gl.gen("x")
            with s.scope("inner"):
                s += "b"
        s += " after"

    state = run(program)
    assert (state["part"], state["inner"]) == ("a!b", "b")


def test_n_answers_are_a_list_and_the_text_goes_on_with_the_first() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x", n=3)

    state = run(program)
    assert state["x"] == ["!", "!1", "!2"] and state.text == "a!"


def test_details_are_the_completion_and_the_selection() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x") + gl.select("y", ["b", "c"])
        s.set("z", 1)

    state = run(program)
    assert state.details("x").text == "!"
    assert state.details("y").logprobs == (-98.0, -99.0)
    with pytest.raises(KeyError, match="neither generated nor selected"):
        state.details("z")


def test_a_selected_text_follows_as_the_tokens_that_were_scored() -> None:
    backend = Scripted(tokenizer=byte_tokenizer(merges=[("Ġ", "A")]))

    def program(s: ProgramState) -> None:
        s += "Grade: " + gl.select("grade", ["A", "B"]) + gl.gen()

    state = run(program, backend)
    assert state["grade"] == "B" and state.text == "Grade: B!"  # ids of " A" are larger, so it is less likely
    assert backend.prompts[-1] == "Grade: B"


# -- turns ---------------------------------------------------------------------------------------------------------


def test_turns_are_written_with_the_chat_template() -> None:
    def program(s: ProgramState) -> None:
        s += gl.system("S")
        with s.user():
            s += "a"
            s += "b"
        s.assistant(gl.gen("x"))
        s += gl.user("c") + gl.assistant("d" + gl.gen("y"))

    backend = Scripted()
    state = run(program, backend)
    messages = [("system", "S"), ("user", "ab"), ("assistant", "!"), ("user", "c"), ("assistant", "d!")]
    assert state.messages == [{"role": role, "content": content} for role, content in messages]
    assert state.text == backend.tokenizer.render(state.messages, add_generation_prompt=False)
    assert backend.prompts[0] == backend.tokenizer.render(state.messages[:2])


def test_spaces_around_given_content_are_trimmed_where_the_template_does() -> None:
    hf = byte_tokenizer()
    hf.chat_template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"

    def program(s: ProgramState) -> None:
        s += gl.user(" a ")
        with s.user():
            s += " b "
            s += gl.gen()
            s += " c "

    state = run(program, Scripted(tokenizer=hf))
    assert state.text == "[a][ b ! c ]"  # once the model has seen a text it stays


def test_a_turn_inside_a_turn_is_an_error() -> None:
    def program(s: ProgramState) -> None:
        with s.user():
            s += gl.assistant("x")

    with pytest.raises(ConfigError, match="assistant begins inside the turn of user"):
        _ = run(program).text


def with_template(template: str) -> Scripted:
    hf = byte_tokenizer()
    hf.chat_template = template
    return Scripted(tokenizer=hf)


def test_a_system_message_may_wait_for_the_turn_it_is_written_in() -> None:
    def program(s: ProgramState) -> None:
        s += gl.system("S")
        (branch,) = s.fork(1)
        branch += gl.user("a") + gl.assistant(gl.gen("x")) + gl.user("b") + gl.assistant("given")
        s.set("text", branch.text)

    state = run(program, with_template(LLAMA_2))
    assert state["text"] == "[INST] <<SYS>>S<</SYS>>  a [/INST]! </s>[INST]  b [/INST] given </s>"
    assert state.text == "" and state.messages == [{"role": "system", "content": "S"}]


def test_the_model_cannot_write_in_a_message_that_waits() -> None:
    def program(s: ProgramState) -> None:
        s += gl.system("S" + gl.gen("x"))

    with pytest.raises(ConfigError, match="writes a system message inside the next turn"):
        run(program, with_template(LLAMA_2))["x"]


def test_an_image_is_refused_when_a_text_model_meets_it() -> None:
    def program(s: ProgramState) -> None:
        s += gl.user("look: " + gl.image("cat.png")) + gl.assistant(gl.gen("x"))

    with pytest.raises(ConfigError, match="scripted reads text only, not images"):
        run(program)["x"]


# -- forks ---------------------------------------------------------------------------------------------------------


def test_modules_stand_in_a_turn_and_in_branches() -> None:
    def program(s: ProgramState) -> None:
        with s.user():
            s += gl.module("facts", " Facts. ") + gl.module("rules", "Rules.")
            forks = s.fork(2)
            forks[0] += "one?" + gl.gen("x")
            forks[1] += gl.module("more", "More.") + "two?" + gl.gen("x")
        forks.join()

    backend = Scripted(count_up)
    state = run(program, backend)
    assert state["x"] == ["0", "0"]
    prompts = [request.prompt for request in backend.requests]
    modules = [[backend.tokenizer.decode(ids.tolist()) for ids in prompt.of_modules] for prompt in prompts]
    header = "user\n"  # a module too, with its special token
    assert sorted(modules) == [[header, " Facts. ", "Rules."], [header, " Facts. ", "Rules.", "More."]]
    assert state.messages[0]["content"] == " Facts. Rules."


@pytest.mark.parametrize(("name", "text"), [("", "x"), ("a", ""), (1, "x"), ("a", None)])
def test_a_module_has_a_name_and_a_text(name: Any, text: Any) -> None:
    with pytest.raises(ConfigError, match="give non-empty text"):
        gl.module(name, text)


def test_a_module_behind_an_answer_fails_the_state() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x")
        s += gl.module("late", "text") + gl.gen("y")

    state = run(program)
    with pytest.raises(ConfigError, match="'late' stands after what the model wrote"):
        _ = state["y"]
    assert state["x"]


def test_branches_go_on_from_the_fork_on_their_own() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x")
        left, right = s.fork(2)
        left += "l" + gl.gen("side")
        right += "rr" + gl.gen("side")
        s += "c"
        s.set("texts", [left.text, right.text, s.text, left["x"]])

    assert run(program)["texts"] == ["a!l!", "a!rr!", "a!c", "!"]


def test_branches_run_at_the_same_time_without_a_thread_each() -> None:
    backend = Scripted(held=True)

    def program(s: ProgramState) -> None:
        s += "a"
        for i, branch in enumerate(s.fork(2000)):
            branch += f"{i}" + gl.gen("x")

    state = run(program, backend)
    assert state.result is None
    backend.wait_for(2000)
    backend.release()
    state.wait()
    assert len(backend.requests) == 2000 and len(backend.batches) < 200


def test_a_fork_keeps_tokens_but_for_the_last_which_may_join_what_follows() -> None:
    backend = Scripted(tokenizer=byte_tokenizer(merges=[("Ġ", "A")]))

    def program(s: ProgramState) -> None:
        s += "x "
        (branch,) = s.fork(1)
        branch += "A" + gl.gen()

    run(program, backend).wait()
    assert backend.requests[0].prompt.ids.tolist() == backend.tokenizer.encode("x A")


def test_forking_before_any_text_works() -> None:
    def program(s: ProgramState) -> None:
        group = s.fork(2)
        group += lambda i: f"{i}" + gl.gen("x")
        group.join()

    assert run(program, Scripted(lambda prompt: prompt * 2))["x"] == ["00", "11"]


def test_a_group_takes_one_for_all_one_for_each_or_a_function() -> None:
    def program(s: ProgramState) -> None:
        group = s.fork(2)
        group += "a"
        group += ["b", "c"]
        group += lambda i: str(i)
        s.set("texts", [branch.text for branch in group])
        with pytest.raises(ConfigError, match="3 expressions for 2 branches"):
            group += ["x", "y", "z"]

    assert run(program)["texts"] == ["ab0", "ac1"]


def test_join_gathers_new_variables_as_lists() -> None:
    def program(s: ProgramState) -> None:
        s.set("old", 1)
        group = s.fork(2)
        for i, branch in enumerate(group):
            branch += "#" * (i + 1) + gl.gen("x")
            branch.set("old", 2)
        group[1].set("extra", "e")
        group.join()
        s.set("values", group["x"])

    state = run(program, Scripted(count_up))
    assert (state["x"], state["extra"], state["old"], state["values"]) == (["1", "2"], [None, "e"], 1, ["1", "2"])


def test_nested_joins_give_nested_lists() -> None:
    def program(s: ProgramState) -> None:
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            inner = branch.fork(2)
            inner += lambda j, i=i: "#" * (2 * i + j + 1) + gl.gen("x")
            inner.join()
        outer.join()

    assert run(program, Scripted(count_up))["x"] == [["1", "2"], ["3", "4"]]


@pytest.mark.parametrize("num_branches", [0, -1, 1.5])
def test_a_fork_needs_a_branch(num_branches: Any) -> None:
    def program(s: ProgramState) -> None:
        s.fork(num_branches)

    with pytest.raises(ConfigError, match="at least 1"):
        raise run(program).error or AssertionError


def test_usage_counts_the_branches() -> None:
    def program(s: ProgramState) -> None:
        s += "ab" + gl.gen()
        for branch in s.fork(2):
            branch += gl.gen()

    assert run(program).usage == Usage(prompt_tokens=2 + 3 + 3, completion_tokens=3)


# -- errors --------------------------------------------------------------------------------------------------------

BROKEN = EngineError("the step failed")


def failing(prompt: str) -> str | Exception:
    return BROKEN if prompt.endswith("fail") else "!"


def test_a_failed_read_raises_the_cause() -> None:
    def program(s: ProgramState) -> None:
        s += "fail" + gl.gen("x")

    state = run(program, Scripted(failing))
    assert state.error is BROKEN
    for read in (lambda: state["x"], lambda: state.text, lambda: state.messages, lambda: state.variables):
        with pytest.raises(EngineError, match="the step failed"):
            read()


def test_appending_after_an_error_neither_raises_nor_hangs() -> None:
    def program(s: ProgramState) -> None:
        s += "fail" + gl.gen("x")
        s.wait()
        s += "more" + gl.gen("y")
        with s.scope("z"), s.user():
            s += "text"
        s.fork(2)[0].__iadd__(gl.gen("w"))

    state = run(program, Scripted(failing))
    for name in ("x", "y", "z"):
        with pytest.raises(EngineError, match="the step failed"):
            state[name]
    assert state.usage == Usage()


def test_variables_before_the_error_stay() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x") + "fail" + gl.gen("y")

    assert run(program, Scripted(failing))["x"] == "!"


def test_one_failed_branch_does_not_stop_the_others_and_is_not_silent() -> None:
    def program(s: ProgramState) -> None:
        good, bad = s.fork(2)
        good += "a" + gl.gen("x")
        bad += "fail" + gl.gen("x")
        s.set("good", good["x"])

    state = run(program, Scripted(failing))
    assert state["good"] == "!" and state.text == ""
    assert state.error is BROKEN


def test_joining_a_failed_branch_fails_at_the_read_of_its_variables() -> None:
    def program(s: ProgramState) -> None:
        group = s.fork(2)
        group += lambda i: ("fail" if i else "a") + gl.gen("x")
        group.join()
        s += "go on" + gl.gen("y")

    state = run(program, Scripted(failing))
    assert state["y"] == "!"
    with pytest.raises(EngineError, match="the step failed"):
        state["x"]


def test_branches_of_a_failed_state_fail_with_it() -> None:
    def program(s: ProgramState) -> None:
        s += "fail" + gl.gen("x")
        (branch,) = s.fork(1)
        branch += gl.gen("y")
        branch["y"]

    assert run(program, Scripted(failing)).error is BROKEN


def test_what_the_programs_own_code_raises_is_its_error() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x")
        raise ZeroDivisionError("own")

    state = run(program)
    assert state["x"] == "!"
    assert isinstance(state.error, ZeroDivisionError)
    for read in (lambda: state["y"], lambda: state.text, lambda: state.result):
        with pytest.raises(ZeroDivisionError, match="own"):
            read()


def test_a_value_that_cannot_be_read_is_an_error_with_the_text() -> None:
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x", dtype=int)

    with pytest.raises(EngineError, match="gen 'x' wrote '!', which is no int"):
        run(program)["x"]


def test_calling_the_model_before_any_text_is_an_error() -> None:
    def program(s: ProgramState) -> None:
        s += gl.gen("x")

    with pytest.raises(ConfigError, match="before there was any text"):
        run(program)["x"]


@pytest.mark.parametrize("item", [None, 3, ["a"]])
def test_only_text_and_expressions_can_be_appended(item: Any) -> None:
    def program(s: ProgramState) -> None:
        s += item

    with pytest.raises(ConfigError, match="cannot be appended to a state"):
        raise run(program).error or AssertionError


def test_token_ids_never_change_once_they_were_part_of_a_prompt() -> None:
    backend = Scripted(lambda prompt: "é\n", tokenizer=byte_tokenizer(merges=[("Ċ", "Ċ"), ("Ġ", "a")]))

    def program(s: ProgramState) -> None:
        for _ in range(4):
            s += "\n a" + gl.gen()

    run(program, backend).wait()
    prompts = [request.prompt.ids for request in backend.requests]
    for earlier, later in zip(prompts, prompts[1:], strict=False):
        assert np.array_equal(later[: len(earlier)], earlier)
