"""What an endpoint can do is proved by what its answers contain."""

from __future__ import annotations

from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import RemoteError
from graftlm.core.program.state import ProgramState
from tests.core.remote.models import answers, continues, writes
from tests.core.remote.server import Server


def test_a_constraint_is_sent_where_the_endpoint_proves_to_keep_it() -> None:
    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "Code: " + gl.gen("code", regex="[xy]{3}", max_tokens=8) + gl.gen("word", choices=["yes", "no"])

    server = Server(writes("hello"), constraints=["structured_outputs"])
    with server, gl.Runtime("m", base_url=server.url) as rt:
        state = program.run(runtime=rt)
        assert state.variables == {"code": "xxx", "word": "yes"}
        assert [c.body.get("structured_outputs") for c in server.calls[1::2]] == [
            {"regex": "[xy]{3}"},
            {"choice": ["yes", "no"]},
        ]


def test_a_llama_cpp_server_gets_its_own_grammars() -> None:
    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "Code: " + gl.gen("code", regex="[xy]{3}(-[0-9]+)?", max_tokens=8) + gl.gen("word", choices=["yes", 'n"o'])
        s += gl.gen("line", grammar='root ::= "a" "b"', max_tokens=8)

    server = Server(writes("hello"), constraints=["grammar"])
    with server, gl.Runtime("m", base_url=server.url) as rt:
        state = program.run(runtime=rt)
        assert [state[name] for name in ("code", "word", "line")] == ["xxx", "yes", "ab"]
        sent = {call.body.get("grammar") for call in server.calls}
        assert {'root ::= ([x-y]){3,3} ("-" ([0-9]){1,}){0,1}', 'root ::= "yes" | "n\\"o"', 'root ::= "a" "b"'} <= sent
        with pytest.raises(RemoteError, match="asked 3 times"):  # not sent, as GBNF has no lookahead
            rt.generate("Code: ", regex="(?=x)[xy]{3}", max_tokens=8)
        assert "grammar" not in server.calls[-1].body


def test_a_server_that_drops_constraints_is_found_out_and_its_answers_are_mended() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "JSON: " + gl.gen("json", json_schema=schema, max_tokens=32)

    with Server(continues('JSON: {"a": 7} and more')) as server, gl.Runtime("m", base_url=server.url) as rt:
        assert program.run(runtime=rt)["json"] == '{"a": 7}'
        assert rt.usage.probe_calls == 4  # response_format, structured_outputs, json_schema and json_object
    with Server(continues('JSON: {"b": 7}', 'JSON: {"a": 8}')) as server, gl.Runtime("m", base_url=server.url) as rt:
        state = program.run(runtime=rt)
        assert state["json"] == '{"a": 8}'  # gone on with where it left the schema
        assert state.usage.api_calls == 2


def test_a_constraint_that_the_user_vouches_for_and_the_server_drops_is_an_error() -> None:
    vouched = {"regex": "structured_outputs"}
    with Server(writes("hello")) as server, gl.Runtime("m", base_url=server.url, capabilities=vouched) as rt:
        done = rt.submit(gl.Request("Say: ", gl.SamplingParams(regex="[xy]{3}")))
        with pytest.raises(RemoteError, match="took 'structured_outputs' and ignored it: it wrote 'hello' for regex="):
            done.result()


def test_the_other_name_of_the_limit_is_learned_from_the_refusal() -> None:
    server = Server(answers({"hello": "Hi."}), max_tokens_field="max_completion_tokens")
    with server, gl.Runtime("m", base_url=server.url) as rt:
        for _ in range(2):
            assert rt.generate([{"role": "user", "content": "hello"}], max_tokens=8).text == "Hi."
        assert ["max_completion_tokens" in r.body for r in server.requests] == [False, True, True]


def test_an_answer_of_whitespace_proves_nothing() -> None:
    with Server(writes("  \n  ")) as server, gl.Runtime("m", base_url=server.url) as rt:
        done = rt.submit(gl.Request("Say: ", gl.SamplingParams(json_schema={"type": "object"}, max_tokens=8)))
        with pytest.raises(gl.GraftError):
            done.result()
        assert rt.endpoint is not None
        assert rt.endpoint.capabilities.json_schema is None


def test_a_first_program_of_constrained_gens_used_to_pay_a_probe_for_its_speculation() -> None:
    """The first speculating call requests log-probabilities itself, and asks once where blanks are not written."""

    def text(s: ProgramState) -> None:
        for name in "ab":
            s += f"{name}: " + gl.gen(name, regex="[0-9]{2}", max_tokens=4) + "\n"

    def chat(s: ProgramState) -> None:
        s += gl.user("hi")
        with s.assistant():
            text(s)

    for function in (text, chat):
        num_calls, found = [], []
        for spec_tokens in (None, 64):
            program = gl.program(temperature=0, num_api_spec_tokens=spec_tokens)(function)
            with Server(writes("12\n34; 56")) as server, gl.Runtime("m", base_url=server.url) as rt:
                found.append(program.run(runtime=rt).variables)
                num_calls.append(len(server.calls))
        assert found[1] == found[0]
        assert num_calls[1] <= num_calls[0]


@pytest.mark.parametrize(
    ("behaviour", "supported"),
    [({}, True), ({"logprobs": False}, False), ({"refuses": {"logprobs": "logprobs is not supported"}}, False)],
)
def test_the_first_speculating_call_finds_out_whether_there_are_log_probabilities(
    behaviour: dict[str, Any], supported: bool
) -> None:
    @gl.program(temperature=0, num_api_spec_tokens=32)
    def program(s: ProgramState) -> None:
        s += "Name: " + gl.gen("name", stop="\n", max_tokens=8) + "\nJob: " + gl.gen("job", stop="\n", max_tokens=8)

    server = Server(continues("Name: Bob\nJob: cook\n"), **behaviour)
    with server, gl.Runtime("m", base_url=server.url) as rt:
        for _ in range(2):
            assert program.run(runtime=rt).variables == {"name": "Bob", "job": "cook"}
        asked = ["logprobs" in call.body for call in server.requests]
    assert rt.usage.probe_calls == 0
    refused = "refuses" in behaviour
    assert asked == ([True, True] if supported else [True, False, False] if refused else [True, False])
