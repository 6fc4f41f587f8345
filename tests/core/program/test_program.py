from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError, EngineError, RequestCancelled, RequestTooLong
from graftlm.core.program.program import Program, set_default_runtime
from graftlm.core.program.run import current_run
from graftlm.core.program.state import ProgramState
from graftlm.core.runtime import Runtime
from graftlm.testing import ScriptedModel
from tests.models import byte_tokenizer, tiny_model
from tests.scripted import Scripted


@gl.program
def ask(s: ProgramState, question: str, shots: str = "") -> str:
    s += shots + "Q: " + question + "\nA:" + gl.gen("answer", max_tokens=4)
    return question


# -- arguments and runtimes ----------------------------------------------------------------------------------------


def test_arguments_go_by_position_and_by_name() -> None:
    backend = Scripted()
    assert ask.run("one", runtime=backend).result == "one"
    assert ask(question="two", shots="S ", runtime=backend).text == "S Q: two\nA:!"


def test_options_given_with_the_function_used_to_be_dropped() -> None:
    made = gl.program(ask.function, num_api_spec_tokens=48, temperature=0.5)
    assert (made.num_api_spec_tokens, made.sampling) == (48, {"temperature": 0.5})


def test_other_keywords_are_sampling_parameters() -> None:
    backend = Scripted()
    gl.program(temperature=0.5, top_k=3)(ask.function).run("x", runtime=backend, top_k=4, max_tokens=9).wait()
    sampling = backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 4, 4)  # the call's own comes first


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "missing a required argument: 'question'; it takes question, shots"),
        ({"question": "x", "shot": "y"}, "unknown argument of ask 'shot'; did you mean 'shots'"),
        ({"question": "x", "temprature": 1}, "did you mean 'temperature'"),
        ({"question": "x", "temperature": -1}, "temperature is -1"),
    ],
)
def test_wrong_arguments_are_told_where_the_program_is_started(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ask.run(runtime=Scripted(), **arguments)


def test_the_name_of_a_model_is_no_runtime() -> None:
    with pytest.raises(ConfigError, match="runtime is 'sprout'; give a Runtime"):
        ask.run("x", runtime="sprout")
    with pytest.raises(ConfigError, match="runtime is 'sprout'; give a Runtime"):
        set_default_runtime("sprout")


def test_without_a_runtime_the_default_one_runs_a_program() -> None:
    backend = Scripted()
    with pytest.raises(ConfigError, match="ask has no runtime"):
        ask.run("x")
    set_default_runtime(backend)
    try:
        assert ask.run("x")["answer"] == "!"
    finally:
        set_default_runtime(None)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "takes no state"),
        (lambda *, s: None, "takes no state"),
        (lambda s, runtime: None, "rename it"),
    ],
)
def test_a_function_that_can_be_no_program_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        gl.program(function)


def test_unknown_options_of_a_program_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        gl.program(temperatur=1)(ask.function)
    wrong: list[Any] = [0, "64", 2.5, True]
    for value in wrong:
        with pytest.raises(ConfigError, match=f"num_api_spec_tokens is {value!r}; it must be a whole number"):
            gl.program(num_api_spec_tokens=value)(ask.function)


def test_bound_arguments_and_options_stay_with_the_program() -> None:
    program = gl.program(num_api_spec_tokens=8, temperature=0)(ask.function)
    bound = program.bind(shots="S ", top_k=2)
    backend = Scripted()
    state = bound.run("x", runtime=backend)
    assert state.text == "S Q: x\nA:!"
    assert (backend.requests[0].sampling.temperature, backend.requests[0].sampling.top_k) == (0, 2)
    assert bound.num_api_spec_tokens == state._run.num_api_spec_tokens == 8
    assert bound.run("x", shots="T ", runtime=backend).text == "T Q: x\nA:!"


def test_a_program_keeps_its_functions_name_and_docstring() -> None:
    assert isinstance(ask, Program) and ask.__name__ == "ask"


# -- nested programs -----------------------------------------------------------------------------------------------


def test_nested_programs_return_at_once_and_run_beside_their_caller() -> None:
    backend = Scripted(held=True)
    started = threading.Event()

    @gl.program(num_api_spec_tokens=8)
    def outer(s: ProgramState) -> None:
        inner = [ask.run(str(i)) for i in range(5)]
        started.set()
        s += "".join(one["answer"] for one in inner)
        s.set("tokens", [one._run.num_api_spec_tokens for one in inner])

    state = outer.run(runtime=backend)
    assert started.wait(120)
    backend.release()
    assert state.text == "!!!!!" and state["tokens"] == [8] * 5


def test_an_inner_failure_is_raised_where_it_is_read() -> None:
    @gl.program
    def outer(s: ProgramState) -> None:
        inner = ask.run("x")
        s += "go on"
        s += inner["answer"]

    error = EngineError("no")
    state = outer.run(runtime=Scripted(lambda prompt: error))
    assert state.error is error


def test_an_inner_program_reading_an_unknown_name_of_its_caller_does_not_hang() -> None:
    @gl.program
    def inner(s: ProgramState, caller: ProgramState) -> None:
        caller["missing"]

    @gl.program
    def outer(s: ProgramState) -> None:
        s.set("error", inner.run(s).error)

    assert isinstance(outer.run(runtime=Scripted())["error"], KeyError)


def test_outside_of_programs_there_is_no_current_run() -> None:
    assert current_run() is None


# -- batches -------------------------------------------------------------------------------------------------------

SHOTS = "Q: 1 + 1\nA: 2\nQ: 2 + 2\nA: 4\n"


def test_a_batch_gives_one_state_per_item_in_order() -> None:
    states = ask.batch([{"question": str(i)} for i in range(20)], runtime=Scripted())
    assert [state.result for state in states] == [str(i) for i in range(20)]
    assert ask.batch([], runtime=Scripted()) == []


def test_what_a_batch_has_in_common_is_computed_once_even_where_it_is_an_argument() -> None:
    backend = Scripted()
    ask.batch([{"question": q, "shots": SHOTS} for q in ("3 + 3", "4 + 4", "5 + 5")], runtime=backend)
    assert backend.warmed == [SHOTS + "Q: "] and backend.unpinned == 1
    assert backend.batches == [3]


def test_user_code_is_run_once_per_item() -> None:
    calls: list[int] = []

    @gl.program
    def counted(s: ProgramState, i: int) -> None:
        calls.append(i)
        s += SHOTS + gl.gen("x")

    counted.batch([{"i": i} for i in range(5)], runtime=Scripted())
    assert sorted(calls) == [0, 1, 2, 3, 4]


def test_a_bad_item_of_a_batch_fails_alone() -> None:
    @gl.program
    def lookup(s: ProgramState, key: str) -> None:
        s += {"a": "x"}[key] + gl.gen("x")

    items: list[Any] = [{"key": "a"}, {"key": "b"}, {"wrong": "a"}, 3, {"key": "a", "temperature": -1}]
    good, bad, unknown, no_item, out_of_range = lookup.batch(items, runtime=Scripted())
    assert good["x"] == "!" and good.error is None
    assert isinstance(bad.error, KeyError)
    for state, reason in ((unknown, "unknown argument"), (no_item, "give a dict"), (out_of_range, "temperature is -1")):
        assert isinstance(state.error, ConfigError) and reason in str(state.error)
        with pytest.raises(ConfigError, match=reason):
            state["x"]


def test_a_batch_of_programs_that_call_no_model_ends() -> None:
    @gl.program
    def text_only(s: ProgramState, i: int) -> None:
        s += str(i)

    assert [s.text for s in text_only.batch([{"i": 1}, {"i": 2}], runtime=Scripted())] == ["1", "2"]


def test_items_that_wait_for_each_other_do_not_hold_the_batch() -> None:
    first_answered = threading.Event()

    @gl.program
    def chained(s: ProgramState, i: int) -> None:
        if i == 1:
            first_answered.wait(120)
        s += "a" + gl.gen("x")
        s["x"]
        first_answered.set()

    assert [s["x"] for s in chained.batch([{"i": 0}, {"i": 1}], runtime=Scripted())] == ["!", "!"]


class ColdBackend(Scripted):
    """One that cannot compute a prefix by itself."""

    def warm(self, prefix: Any) -> Scripted:
        raise OSError("no")


def test_a_batch_whose_prefix_cannot_be_computed_goes_on_without() -> None:
    states = ask.batch([{"question": q, "shots": SHOTS} for q in "ab"], runtime=ColdBackend())
    assert [state["answer"] for state in states] == ["!", "!"]


def test_more_items_than_threads_all_run() -> None:
    @gl.program
    def reading(s: ProgramState, i: int) -> None:
        s += "a" + gl.gen("x")
        s += s["x"] + gl.gen("y")

    states = reading.batch([{"i": i} for i in range(30)], runtime=Scripted(), max_concurrency=4)
    assert [state["y"] for state in states] == ["!"] * 30


def test_sampling_parameters_of_a_batch_hold_for_all_items() -> None:
    backend = Scripted()
    ask.batch([{"question": "x"}, {"question": "y", "top_k": 7}], runtime=backend, top_k=5)
    assert sorted(request.sampling.top_k for request in backend.requests) == [5, 7]
    with pytest.raises(ConfigError, match="unknown sampling parameter"):
        ask.batch([{"question": "x"}], runtime=backend, shots="no")


async def test_an_async_batch_does_not_block_the_loop() -> None:
    backend = Scripted(held=True)
    task = asyncio.create_task(ask.abatch([{"question": "x"}, {"question": "y"}], runtime=backend))
    while len(backend.requests) < 2:
        await asyncio.sleep(0)
    backend.release()
    assert [state["answer"] for state in await task] == ["!", "!"]


# -- async and streams ---------------------------------------------------------------------------------------------


async def test_arun_gives_a_finished_state() -> None:
    state = await ask.arun("x", runtime=Scripted())
    assert state._run.done and state["answer"] == "!"


async def test_cancelling_arun_cancels_its_calls() -> None:
    backend = Scripted(held=True)
    task = asyncio.create_task(ask.arun("x", runtime=backend))
    while not backend.futures:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.futures[0].cancelled()


def test_a_cancelled_program_raises_at_its_reads() -> None:
    backend = Scripted(held=True)

    @gl.program
    def outer(s: ProgramState) -> None:
        inner = ask.run("x")
        s += "a" + gl.gen("y")
        inner["answer"]

    state = outer.run(runtime=backend)
    backend.wait_for(2)
    state.cancel()
    assert isinstance(state.error, RequestCancelled)
    with pytest.raises(RequestCancelled):
        state["y"]


def test_chunks_carry_the_name_of_the_variable() -> None:
    @gl.program
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x") + "b" + gl.gen() + gl.select("y", ["no", "yes"])

    stream = program.stream(runtime=Scripted(lambda prompt: "hey"))
    chunks = [(chunk.name, chunk.text) for chunk in stream]
    assert chunks == [("x", c) for c in "hey"] + [(None, c) for c in "hey"] + [("y", "no")]
    assert stream.state.text == "aheybheyno"


def test_a_stream_raises_what_went_wrong_at_its_end() -> None:
    def rule(prompt: str) -> str | Exception:
        return EngineError("no") if prompt.endswith("b") else "!"

    @gl.program
    def program(s: ProgramState) -> None:
        s += "a" + gl.gen("x") + "b" + gl.gen("y")

    stream = program.stream(runtime=Scripted(rule))
    assert next(stream).text == "!"
    with pytest.raises(EngineError, match="no"):
        next(stream)


def test_closing_a_stream_cancels_the_program() -> None:
    backend = Scripted(held=True)
    stream = ask.stream("x", runtime=backend)
    backend.wait_for(1)
    stream.close()
    assert isinstance(stream.state.error, RequestCancelled)
    assert backend.futures[0].cancelled()


async def test_an_async_stream_gives_the_same_chunks() -> None:
    chunks = [chunk.text async for chunk in ask.astream("x", runtime=Scripted(lambda prompt: "hey"))]
    assert chunks == ["h", "e", "y"]


# -- on the real runtime -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(tiny_model(), tokenizer=byte_tokenizer(), dtype="float32") as runtime:
        yield runtime


def test_a_chat_program_answers_what_generate_answers(runtime: Runtime) -> None:
    @gl.program
    def chat(s: ProgramState) -> None:
        s += gl.system("Be brief.") + gl.user("Hello?")
        s += gl.assistant(gl.gen("x", max_tokens=12))

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    assert (
        chat.run(runtime=runtime, temperature=0)["x"] == runtime.generate(messages, temperature=0, max_tokens=12).text
    )


def test_a_second_call_finds_the_kv_of_everything_before(runtime: Runtime) -> None:
    @gl.program
    def two(s: ProgramState) -> None:
        s += "A long beginning of a text that goes on:" + gl.gen("x", max_tokens=8, ignore_eos=True)
        s += " and" + gl.gen("y", max_tokens=2)

    state = two.run(runtime=runtime, temperature=0)
    first, second = state.details("x").usage, state.details("y").usage
    assert second.cached_tokens >= first.prompt_tokens + 7  # the KV of the last generated token was never needed
    assert second.prompt_tokens == first.prompt_tokens + 8 + len(" and")


def test_the_shots_of_a_batch_are_computed_once(runtime: Runtime) -> None:
    runtime.clear_cache()
    runtime.reset_stats()
    states = ask.batch([{"question": f"{i} + {i}", "shots": SHOTS} for i in range(10, 18)], runtime=runtime)
    assert all(state.error is None for state in states)
    shared, own = len(SHOTS + "Q: 1"), len("0 + 10\nA:")
    assert runtime.stats().computed_tokens <= shared + 8 * own
    assert runtime.stats().slots_in_use == 0


def test_typed_answers_are_values(runtime: Runtime) -> None:
    @gl.program
    def typed(s: ProgramState) -> None:
        s += "n = " + gl.gen("n", dtype=int, max_tokens=3) + ", f = " + gl.gen("f", dtype=float, max_tokens=4)
        s += ", b = " + gl.gen("b", dtype=bool) + ", t = " + gl.gen("t", dtype=str, max_tokens=8)

    state = typed.run(runtime=runtime, seed=1)
    assert [type(state[name]) for name in "nfbt"] == [int, float, bool, str]
    assert f', b = {state["b"]}, t = "{state["t"]}"'.lower() in state.text.lower()


def test_streamed_text_is_the_variables_text(runtime: Runtime) -> None:
    stream = ask.stream("why?", runtime=runtime, temperature=0)
    text = "".join(chunk.text for chunk in stream if chunk.name == "answer")
    assert text == stream.state["answer"]


def test_a_prompt_beyond_the_context_fails_its_state_alone(runtime: Runtime) -> None:
    long, short = ask.batch([{"question": "x" * 600}, {"question": "x"}], runtime=runtime)
    assert isinstance(long.error, RequestTooLong) and "512" in str(long.error)
    assert short.error is None


def test_closing_the_runtime_ends_programs_with_the_cause() -> None:
    runtime = Runtime(tiny_model(), tokenizer=byte_tokenizer(), dtype="float32").load()
    runtime.close()
    state = ask.run("x", runtime=runtime)
    assert isinstance(state.error, EngineError) and "closed" in str(state.error)


# -- characters of several tokens ------------------------------------------------------------------------------------


@gl.program
def cut(s: ProgramState, after: str = "", regex: str | None = None) -> None:
    s += "x" + gl.gen("a", max_tokens=6)  # two bytes into the second character
    s += after + gl.gen("b", max_tokens=3, regex=regex)


def test_a_gen_after_one_that_was_cut_inside_a_character_used_to_go_on_after_a_mark() -> None:
    whole = "👍👍!"
    rest = whole.encode()[6:]
    with ScriptedModel(lambda prompt: whole if prompt == "x" else rest).runtime() as runtime:
        state = cut.run(runtime=runtime)
        assert (state["a"], state["b"], state.text) == ("👍", "👍!", "x👍👍!")
        assert [chunk.text for chunk in cut.stream(runtime=runtime)] == ["👍", "", "👍", "!"]


@pytest.mark.parametrize(("after", "regex"), [(".", None), ("", "[0-9]+")])
def test_text_and_constraints_take_the_place_of_an_unfinished_character(after: str, regex: str | None) -> None:
    with ScriptedModel(lambda prompt: "👍👍" if prompt == "x" else "12").runtime() as runtime:
        state = cut.run(after=after, regex=regex, runtime=runtime)
        assert (state["b"], state.text) == ("12", f"x👍{after}12")


# -- mistakes that used to pass in silence ----------------------------------------------------------------------------


def test_a_decorated_program_used_to_be_no_object_that_pickle_takes() -> None:
    assert pickle.loads(pickle.dumps(ask)) is ask
    bound = pickle.loads(pickle.dumps(ask.bind(shots="S ", temperature=0.5)))
    assert (bound.function, bound.bound, bound.sampling) == (ask.function, {"shots": "S "}, {"temperature": 0.5})


def test_a_program_that_yields_used_to_run_nothing() -> None:
    def yields(s: ProgramState) -> Iterator[str]:
        s += gl.gen("x", max_tokens=2)
        yield "x"

    async def yields_later(s: ProgramState) -> Any:
        yield "x"

    with pytest.raises(ConfigError, match="yields yields, so calling it would run nothing"):
        gl.program(yields)
    with pytest.raises(ConfigError, match="yields_later is async"):
        gl.program(yields_later)


def test_appending_to_a_branch_by_its_number_used_to_raise_after_it_had_appended() -> None:
    @gl.program
    def branches(s: ProgramState) -> None:
        s += "x"
        forks = s.fork(2)
        forks[0] += "a"
        forks[-1] += "b"
        s.set("texts", [fork.text for fork in forks])
        with pytest.raises(ConfigError, match="append with"):
            forks[0] = s

    assert branches.run(runtime=Scripted())["texts"] == ["xa", "xb"]
