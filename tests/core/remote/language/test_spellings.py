"""JSON that an endpoint spells otherwise than the grammar is as valid, and is told from an answer that is not."""

from __future__ import annotations

import json

import pytest

import graftlm as gl
from graftlm.core.errors import RemoteError
from graftlm.core.program.state import ProgramState
from tests.core.remote.models import continues
from tests.core.remote.server import Server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@gl.program(temperature=0)
def program(s: ProgramState) -> None:
    s += "JSON: " + gl.gen("json", json_schema=SCHEMA, max_tokens=64)


@pytest.mark.parametrize("enforced", [True, False])
@pytest.mark.parametrize(
    "written",
    [
        '{"age": 7, "name": "Zoë"}',
        r'{"name": "Zo\u00eb", "age": 7}',
        '{"name":"Zoë","age":7.0}',
        "{\n" + 30 * " " + '"name": "Zoë",\n' + 30 * " " + '"age": 7\n}',
    ],
)
def test_another_spelling_is_the_same_value_in_one_call(written: str, enforced: bool) -> None:
    capabilities = {"json_schema": "response_format" if enforced else "none"}
    with (
        Server(continues(f"JSON: {written}")) as server,
        gl.Runtime("m", base_url=server.url, capabilities=capabilities) as rt,
    ):
        state = program.run(runtime=rt)
        assert json.loads(state["json"]) == {"name": "Zoë", "age": 7}
        assert state.usage.api_calls == 1


@pytest.mark.parametrize(
    "written",
    ['{"age": 7}', '{"age": "7", "name": "Zoë"}', '{"age": 7, "name": "Zoë", "age": 7}', '{"age": NaN, "name": "Zoë"}'],
)
def test_another_value_is_not(written: str) -> None:
    enforced = {"json_schema": "response_format"}
    with (
        Server(continues(f"JSON: {written}")) as server,
        gl.Runtime("m", base_url=server.url, capabilities=enforced) as rt,
        pytest.raises(
            RemoteError, match="did not keep it: it wrote .*, where character 3 is not allowed, for json_schema="
        ),
    ):
        program.run(runtime=rt)["json"]


def test_the_error_shows_where_a_long_answer_leaves_its_constraint() -> None:
    enforced, name = {"json_schema": "response_format"}, 90 * "a"
    loose = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

    @gl.program(temperature=0)
    def long(s: ProgramState) -> None:
        s += "JSON: " + gl.gen("json", json_schema=loose, max_tokens=200)

    with (
        Server(continues(f'JSON: {{"name": "{name}\x01 b"}}')) as server,
        gl.Runtime("m", base_url=server.url, capabilities=enforced) as rt,
        pytest.raises(RemoteError, match=r"it wrote '…a{40}\\x01 b\"}', where character 101 is not allowed,"),
    ):
        long.run(runtime=rt)["json"]


def test_an_answer_that_the_limit_cuts_within_its_blanks_is_cut_and_not_wrong() -> None:
    enforced = {"json_schema": "response_format"}
    with (
        Server(continues("JSON: {" + 200 * "\n")) as server,
        gl.Runtime("m", base_url=server.url, capabilities=enforced) as rt,
    ):
        done = rt.complete(gl.Request("JSON: ", gl.SamplingParams(json_schema=SCHEMA, max_tokens=64)))
        assert done.finish_reason == "length"
        assert done.text.strip() == "{"
