"""Programs at an endpoint, without speculation and with it."""

from __future__ import annotations

from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError, RemoteError
from graftlm.core.program.state import ProgramState
from tests.core.remote.models import Model, answers, continues, follows_layout, writes
from tests.core.remote.server import Fault, Server

KNOWN = {"continue_turn": "continue_final_message", "logprobs": False, "echo": False, "regex": "none"}
FORM = "Name: Ann\nAge: 31\nCity: Bonn\n"


def runtime(server: Server, **capabilities: Any) -> gl.Runtime:
    return gl.Runtime("m", base_url=server.url, capabilities=KNOWN | capabilities)


def fill(s: ProgramState) -> None:
    s += "Name: " + gl.gen("name", stop="\n", max_tokens=8) + "\nAge: " + gl.gen("age", dtype=int, max_tokens=8)
    s += "\nCity: " + gl.gen("city", stop="\n", max_tokens=8) + "\n"


def chat(s: ProgramState) -> None:
    s += gl.system("You fill in forms.")
    s += gl.user("Ann, 31, of Bonn.")
    with s.assistant():
        fill(s)
    s += gl.user("Thanks!")


VALUES = {"name": "Ann", "age": 31, "city": "Bonn"}


@pytest.mark.parametrize("num_spec_tokens", [None, 4, 16, 64])
@pytest.mark.parametrize("logprobs", [True, False])
def test_text_values_are_the_same_with_fewer_calls(num_spec_tokens: int | None, logprobs: bool) -> None:
    program = gl.program(num_api_spec_tokens=num_spec_tokens, temperature=0)(fill)
    with Server(continues(FORM)) as server, runtime(server, logprobs=logprobs) as rt:
        state = program.run(runtime=rt)
        assert (state.variables, state.text) == (VALUES, FORM)
        usage = state.usage
        assert usage.api_calls == len(server.calls) == 3 - usage.calls_saved
        assert server.totals()[1:] == (usage.prompt_tokens, usage.completion_tokens)
        if num_spec_tokens is None:
            assert (usage.calls_saved, usage.spec_tokens_used, usage.spec_tokens_wasted) == (0, 0, 0)
        if num_spec_tokens == 64:
            assert (usage.api_calls, usage.calls_saved, usage.spec_tokens_wasted) == (1, 2, 0)


@pytest.mark.parametrize("num_spec_tokens", [None, 64])
@pytest.mark.parametrize("manner", ["continue_final_message", "prefix", "bare"])
def test_a_turn_is_continued_as_the_endpoint_wants_it(manner: str, num_spec_tokens: int | None) -> None:
    program = gl.program(num_api_spec_tokens=num_spec_tokens, temperature=0)(chat)
    model = answers({"1 to 20": "1 2 3 4 5 6 7 8 9", "Bonn": FORM})
    with Server(model, continue_turn=manner) as server, runtime(server, continue_turn=None) as rt:
        state = program.run(runtime=rt)
        assert state.variables == VALUES
        assert [turn["role"] for turn in state.messages] == ["system", "user", "assistant", "user"]
        assert state.messages[2]["content"] == FORM
        usage = state.usage
        assert usage.probe_calls == {"continue_final_message": 1, "prefix": 2, "bare": 1}[manner]
        assert usage.api_calls == (1 if num_spec_tokens else 3)
        assert len(server.calls) == usage.api_calls + usage.probe_calls
        program.run(runtime=rt).wait()
        assert rt.usage.probe_calls == usage.probe_calls  # known by now


def test_forks_go_on_at_the_same_time_and_bills_add_up() -> None:
    @gl.program(temperature=0, num_api_spec_tokens=32)
    def program(s: ProgramState) -> None:
        s += "A: " + gl.gen("a", stop=";") + ";"
        parts = s.fork(2)
        for part in parts:
            part += " B: " + gl.gen("b", stop=";")
        s.set("all", parts["b"])

    with Server(continues("A: x; B: y; C: z")) as server, runtime(server) as rt:
        state = program.run(runtime=rt)
        assert (state["a"], state["all"]) == ("x", ["y", "y"])
        usage = state.usage
        assert usage.api_calls == len(server.calls)
        assert (usage.api_calls, usage.calls_saved) == (1, 2)  # greedy branches share what was fetched
        assert server.totals()[1:] == (usage.prompt_tokens, usage.completion_tokens)


def test_a_select_takes_what_was_written_or_asks() -> None:
    def program(s: ProgramState) -> None:
        s += "Q: " + gl.gen("q", stop="\n") + "\nA: " + gl.select("a", ["no", "yes"]) + "\n" + gl.gen("end", stop=".")

    document = "Q: good?\nA: yes\nDone. More"
    for spec, calls, how in ((None, 3, "asked"), (64, 1, "generated")):
        with Server(continues(document)) as server, runtime(server, choices="none") as rt:
            state = gl.program(num_api_spec_tokens=spec, temperature=0)(program).run(runtime=rt)
            assert state.variables == {"q": "good?", "a": "yes", "end": "Done"}
            assert (len(server.calls), state.details("a").how) == (calls, how)


def test_several_values_are_one_request() -> None:
    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "Say: " + gl.gen("said", n=3, stop=".")

    with Server(writes("hi. there")) as server, runtime(server) as rt:
        assert program.run(runtime=rt)["said"] == ["hi", "hi", "hi"]
        assert len(server.calls) == 1


def test_a_batch_and_64_programs_do_not_mix() -> None:
    @gl.program(temperature=0, num_api_spec_tokens=64)
    def program(s: ProgramState, i: int) -> None:
        s += f"{i} Name: " + gl.gen("name", stop="\n") + "\nAge: " + gl.gen("age", dtype=int) + "\n"

    documents = [f"{i} Name: N{i}\nAge: {i + 20}\nEnd" for i in range(64)]
    with Server(continues(*documents), seconds_per_call=0.01) as server, runtime(server) as rt:
        states = program.batch([{"i": i} for i in range(64)], runtime=rt)
        assert [s.variables for s in states] == [{"name": f"N{i}", "age": i + 20} for i in range(64)]
        assert sum(s.usage.api_calls for s in states) == len(server.calls) == 64
        assert sum(s.usage.prompt_tokens for s in states) == server.totals()[1]
        assert sum(s.usage.completion_tokens for s in states) == server.totals()[2]


def test_a_program_streams_its_values_with_their_names() -> None:
    program = gl.program(temperature=0, num_api_spec_tokens=64)(fill)
    with Server(continues(FORM)) as server, runtime(server) as rt:
        written: dict[str | None, str] = {}
        for chunk in program.stream(runtime=rt):
            written[chunk.name] = written.get(chunk.name, "") + chunk.text
        assert written == {"name": "Ann", "age": "31", "city": "Bonn"}


@pytest.mark.parametrize("num_spec_tokens", [None, 64])
def test_values_stream_while_they_are_written(num_spec_tokens: int | None) -> None:
    @gl.program(temperature=0, num_api_spec_tokens=num_spec_tokens)
    def program(s: ProgramState) -> None:
        s += "Q: " + gl.gen("q", stop="\n", max_tokens=32) + "\nA: " + gl.gen("a", stop="\n", max_tokens=64)

    document = "Q: what is it\nA: a thing of parts\nQ: and"
    with Server(continues(document), seconds_per_token=0.05) as server, runtime(server, logprobs=True) as rt:
        first: dict[str | None, int] = {}
        written: dict[str | None, list[str]] = {}
        for chunk in program.stream(runtime=rt):
            # what a value's first piece came before: the end of the calls so far
            first.setdefault(chunk.name, sum(call.answered for call in server.calls))
            written.setdefault(chunk.name, []).append(chunk.text)
        assert {name: "".join(pieces) for name, pieces in written.items()} == {
            "q": "what is it",
            "a": "a thing of parts",
        }
        assert all(len([piece for piece in pieces if piece]) > 1 for pieces in written.values())
        assert first == ({"q": 0, "a": 0} if num_spec_tokens else {"q": 0, "a": 1})
        assert len(server.calls) == (1 if num_spec_tokens else 2)
        assert server.totals()[1:] == (rt.usage.prompt_tokens, rt.usage.completion_tokens)
        assert rt.usage.estimated == 0


def test_a_program_goes_on_with_a_value_while_its_call_is_still_answered() -> None:
    @gl.program(temperature=0, num_api_spec_tokens=64)
    def program(s: ProgramState) -> None:
        s += "Q: " + gl.gen("q", stop="\n", max_tokens=32)
        seen.append((s["q"], server.calls[0].answered))
        s += "\nA: " + gl.gen("a", stop="\n", max_tokens=64)

    seen: list[tuple[str, bool]] = []
    with (
        Server(continues("Q: one two\nA: three\nQ: and so on"), seconds_per_token=0.05) as server,
        runtime(server) as rt,
    ):
        chunks = list(program.stream(runtime=rt))
        assert seen == [("one two", False)]
        assert "".join(chunk.text for chunk in chunks if chunk.name == "a") == "three"
        assert len(server.calls) == 1 and rt.usage.completion_tokens == server.calls[0].completion_tokens


def test_streamed_json_is_told_as_far_as_it_is_sure_to_stay() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}

    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "J: " + gl.gen("j", json_schema=schema, max_tokens=64)

    with Server(continues('J: {"a": "one two three"} and more')) as server, runtime(server, json_schema="none") as rt:
        pieces = [chunk.text for chunk in program.stream(runtime=rt)]
    assert "".join(pieces) == '{"a": "one two three"}' and len(pieces) > 5


def test_a_call_that_breaks_off_keeps_what_was_decided_and_fails_what_was_not() -> None:
    @gl.program(temperature=0, num_api_spec_tokens=64)
    def program(s: ProgramState) -> None:
        s += "Q: " + gl.gen("q", stop="\n", max_tokens=32) + "\nA: " + gl.gen("a", stop="\n", max_tokens=64)

    faults = [Fault(cut_after=6)]
    with Server(continues("Q: one two\nA: three four\nQ: and"), faults=faults) as server, runtime(server) as rt:
        pieces: list[tuple[str | None, str]] = []
        with pytest.raises(RemoteError, match="broke its answer off"):
            pieces.extend((chunk.name, chunk.text) for chunk in program.stream(runtime=rt))
        assert "".join(text for name, text in pieces if name == "q") == "one two"
        assert len(server.calls) == 1  # nothing is asked again after a stream has begun


async def test_programs_on_an_event_loop() -> None:
    program = gl.program(temperature=0, num_api_spec_tokens=64)(fill)
    with Server(continues(FORM)) as server, runtime(server) as rt:
        assert (await program.arun(runtime=rt)).variables == VALUES


def test_cancelling_a_program_closes_its_connections() -> None:
    program = gl.program(temperature=0)(fill)
    with Server(continues(FORM), seconds_per_call=60) as server, runtime(server) as rt:
        state = program.run(runtime=rt)
        server.wait_until(lambda s: len(s.requests) == 1)
        state.cancel()
        server.wait_until(lambda s: s.requests[0].closed_by_client)
        with pytest.raises(gl.RequestCancelled):
            _ = state["name"]


# -- chat endpoints that cannot continue a turn ----------------------------------------------------------------------

FIELDS = {"name": "Ann", "age": "31", "city": "Bonn"}


def form(s: ProgramState) -> None:
    s += gl.user("Ann, 31, of Bonn.")
    with s.assistant():
        fill(s)


@pytest.mark.parametrize(("num_spec_tokens", "calls"), [(None, 3), (64, 1)])
def test_a_form_is_shown_and_filled_in(num_spec_tokens: int | None, calls: int) -> None:
    program = gl.program(temperature=0, num_api_spec_tokens=num_spec_tokens)(form)
    with Server(follows_layout(FIELDS)) as server, runtime(server, continue_turn="none") as rt:
        state = program.run(runtime=rt)
        assert state.variables == VALUES
        assert state.messages[1]["content"] == FORM
        assert (len(server.calls), state.usage.api_calls, state.usage.calls_saved) == (calls, calls, 3 - calls)
        asked = server.calls[0].body["messages"][-1]["content"]
        assert asked.startswith("Ann, 31, of Bonn.\n\nReply with exactly this form, nothing before or after it;")
        assert asked.endswith("Name: <name>\nAge: <age: an integer>\nCity: <city>\n")


def test_examples_make_the_hint_unnecessary() -> None:
    @gl.program(temperature=0, num_api_spec_tokens=64)
    def program(s: ProgramState) -> None:
        s += gl.user("Bob, 40, of Rome.") + gl.assistant("Name: Bob\nAge: 40\nCity: Rome\n")
        form(s)

    with Server(answers({"Ann": FORM})) as server, runtime(server, continue_turn="none") as rt:
        assert program.run(runtime=rt).variables == VALUES
        assert [m["content"] for m in server.calls[0].body["messages"]][-1] == "Ann, 31, of Bonn."
        assert len(server.calls) == 1


@pytest.mark.parametrize("preamble", ["\n", "```text\n"])
def test_blanks_and_a_fence_before_the_form_are_let_pass(preamble: str) -> None:
    program = gl.program(temperature=0, num_api_spec_tokens=64)(form)
    with Server(follows_layout(FIELDS, preamble)) as server, runtime(server, continue_turn="none") as rt:
        assert program.run(runtime=rt).variables == VALUES
        assert len(server.calls) == 1


def test_a_preamble_is_asked_about_once_and_never_taken_for_a_value() -> None:
    program = gl.program(temperature=0, num_api_spec_tokens=64)(form)
    with Server(follows_layout(FIELDS, "Sure! ")) as server, runtime(server, continue_turn="none") as rt:
        state = program.run(runtime=rt)
        assert (state.variables, state.usage.misses) == (VALUES, {"layout not followed": 1})
        assert len(server.calls) == 2
    with Server(answers({"Ann": "Sure! Name: Ann"})) as server, runtime(server, continue_turn="none") as rt:
        state = program.run(runtime=rt)
        with pytest.raises(RemoteError, match=r"gen 'name'.*was to begin with 'Name: ' and begins with 'Sure! Name"):
            _ = state["name"]
        assert len(server.calls) == 2


def test_a_value_that_may_be_too_long_is_kept_where_its_turn_cannot_be_gone_on_with() -> None:
    """The field used to be asked for anew, by words that the model did not follow."""

    @gl.program(temperature=0, num_api_spec_tokens=64)
    def program(s: ProgramState) -> None:
        s += gl.user("Ann of Bad Godesberg")
        with s.assistant():
            s += "Name: " + gl.gen("name", stop="\n") + "\nCity: " + gl.gen("city", stop="\n", max_tokens=12) + "\n"

    said = answers({"Ann": "Name: Ann\nCity: Bad Godesberg am Rhein\n"})
    with Server(said) as server, runtime(server, continue_turn="none") as rt:
        assert program.run(runtime=rt)["city"] == "Bad Godesberg am Rhein"  # 22 bytes, 7 tokens
        assert len(server.calls) == 1


def test_a_turn_that_begins_anew_is_never_taken_for_a_value() -> None:
    program = gl.program(temperature=0)(form)
    asked_on = "Continue exactly where you stopped"
    said = answers({"Ann": "Name: Ann", asked_on: "Name: Ann\nCounty"})
    with Server(said) as server, runtime(server, continue_turn="none") as rt:
        state = program.run(runtime=rt)
        with pytest.raises(RemoteError, match=r"gen 'age'.*was to begin with '\\nAge: ' and begins with 'Name: Ann"):
            _ = state["age"]
        assert state["name"] == "Ann"


def test_a_lone_gen_of_a_turn_is_a_plain_call() -> None:
    @gl.program(temperature=0, num_api_spec_tokens=64)
    def program(s: ProgramState) -> None:
        s += gl.user("Hi") + gl.assistant(gl.gen("a", stop="."))

    with Server(answers({"Hi": "Hello. You."})) as server, runtime(server, continue_turn="none") as rt:
        assert program.run(runtime=rt)["a"] == "Hello"
        assert server.calls[0].body["messages"] == [{"role": "user", "content": "Hi"}]
        assert server.calls[0].body["stop"] == ["."]


# -- constraints -----------------------------------------------------------------------------------------------------


def test_what_the_model_will_not_write_is_an_error_that_names_the_gen() -> None:
    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "Age: " + gl.gen("age", dtype=int)

    with Server(writes("unknown")) as server, runtime(server) as rt:
        with pytest.raises(RemoteError, match="wrote 'unknown', asked once, which is not of regex="):
            _ = program.run(runtime=rt)["age"]
        assert len(server.calls) == 1  # the same again would bring the same


def test_choices_are_scored_where_the_endpoint_echoes() -> None:
    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "Good? " + gl.select("a", ["no", "yes"])

    with Server(writes("yes")) as server, runtime(server, echo=True) as rt:
        selection = program.run(runtime=rt).details("a")
        assert (selection.how, selection.logprobs) == ("scored", (-0.5, -0.5))


# -- bad input -------------------------------------------------------------------------------------------------------


def test_text_outside_of_turns_is_an_error() -> None:
    @gl.program
    def before(s: ProgramState) -> None:
        s += "Before. "
        s += gl.user("Hi") + gl.assistant(gl.gen("a"))

    @gl.program
    def between(s: ProgramState) -> None:
        s += gl.user("Hi") + "between" + gl.assistant(gl.gen("a"))

    @gl.program
    def user_gen(s: ProgramState) -> None:
        s += gl.user("Hi" + gl.gen("a"))

    with Server(writes("x")) as server, runtime(server) as rt:
        for program, reason in ((before, "stands before the first turn"), (between, "outside of the chat's turns"),
                                (user_gen, "'a' stands in the turn of user")):  # fmt: skip
            with pytest.raises(ConfigError, match=reason):
                _ = program.run(runtime=rt)["a"]
        assert server.requests == []


def test_text_for_an_endpoint_that_only_chats_says_what_to_write() -> None:
    program = gl.program(temperature=0)(fill)
    with Server(writes("x"), completions=False) as server, runtime(server) as rt:
        state = program.run(runtime=rt)
        with pytest.raises(RemoteError, match=r"answered 404.*for an endpoint that only chats give messages"):
            _ = state["name"]


def test_a_model_that_is_not_there_is_named_without_a_word_of_paths() -> None:
    said = r"answered 404 model_not_found.*and the model's name$"
    with Server(writes("x")) as server, gl.Runtime("other", base_url=server.url) as rt:
        server.behaviour.model = "m"
        with pytest.raises(RemoteError, match=said):
            rt.generate("x", max_tokens=2)


# -- constraints that nothing enforces ---------------------------------------------------------------------------------


def choose(s: ProgramState) -> None:
    s += "Pick one:" + gl.select("choice", ["Apple", "Avocado"])


@pytest.mark.parametrize("written", [" Apple", "\n\n   Apple pie", "Apple"])
def test_blanks_before_a_choice_used_to_end_in_an_index_error(written: str) -> None:
    with Server(continues(f"Pick one:{written}")) as server, runtime(server, choices="none") as rt:
        state = gl.program(choose).run(runtime=rt)
        assert state["choice"] == "Apple"


def letter_by_letter(text: str) -> Model:
    """Continues a text by single characters."""
    whole = continues(text)
    return lambda prompt, draw: (whole(prompt, draw) or "")[:1] or None


def test_a_choice_that_the_limit_cuts_is_continued() -> None:
    model = letter_by_letter("Pick one:" + " " * 12 + "Avocado")
    with Server(model) as server, runtime(server, choices="none") as rt:
        assert gl.program(choose).run(runtime=rt)["choice"] == "Avocado"
        assert len(server.calls) == 2


def test_blanks_alone_are_an_error_that_names_the_choice() -> None:
    with Server(letter_by_letter("Pick one:" + " " * 40)) as server, runtime(server, choices="none") as rt:
        state = gl.program(choose).run(runtime=rt)
        with pytest.raises(RemoteError, match="select 'choice'"):
            state["choice"]


def test_a_model_that_leaves_a_constraint_at_once_used_to_fail_where_the_empty_text_is_allowed() -> None:
    with Server(continues("go: no")) as server, runtime(server) as rt:
        assert rt.generate("go: ", regex="(yes)?", max_tokens=8).text == ""
        assert rt.generate("go: ", regex="[0-9]*", max_tokens=8).text == ""


def test_a_speculated_value_under_an_enforced_constraint_used_to_be_paid_twice() -> None:
    def ask(s: ProgramState) -> None:
        for name in "abcd":
            s += f"{name}: " + gl.gen(name, regex="[0-9]{2}", max_tokens=4) + "\n"

    totals = []
    for num in (None, 64):
        program = gl.program(num_api_spec_tokens=num, temperature=0)(ask)
        with Server(writes("12"), constraints=["regex"]) as server, runtime(server, regex="regex") as rt:
            assert len(program.run(runtime=rt)["d"]) == 2
            totals.append((len(server.calls), server.totals()[2]))
    assert totals[1] == totals[0]


def test_the_stop_that_a_server_names_used_to_be_dropped() -> None:
    def named(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices", ()):
            choice["stop_reason"] = "\n" if choice.get("finish_reason") == "stop" else None
        return body

    with Server(writes("31\n"), edit=named) as server, runtime(server) as rt:
        assert rt.generate("Age: ", stop="\n").stop == "\n"
        assert rt.generate("Age: ", stop="\n", regex="[0-9]+", max_tokens=8).stop == "\n"


def test_a_module_is_text_as_any_other() -> None:
    def program(s: ProgramState) -> None:
        s += gl.module("form", "Na") + gl.module("more", "me: ")
        s += gl.gen("name", stop="\n", max_tokens=8)

    with Server(continues(FORM)) as server, runtime(server) as rt:
        assert gl.program(temperature=0)(program).run(runtime=rt)["name"] == "Ann"
