from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

import graftlm as gl
from tests.core.remote.server import Server


class Person(BaseModel):
    age: int


AGE = {"properties": {"age": {"title": "Age", "type": "integer"}}, "required": ["age"], "title": "Person"}


@pytest.mark.parametrize(
    ("schema", "sent"),
    [
        (Person, {**AGE, "type": "object"}),
        (gl.JsonSchema(Person), {**AGE, "type": "object"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        ('{"type": "integer"}', {"type": "integer"}),
        (True, {}),
    ],
)
def test_every_kind_of_schema_reaches_the_endpoint(schema: Any, sent: Any) -> None:
    constraints = {"json_schema": "response_format"}
    with Server(lambda _: "[]") as server, gl.Runtime("m", base_url=server.url, capabilities=constraints) as runtime:
        runtime.submit(gl.Request("x", gl.SamplingParams(json_schema=schema, max_tokens=8))).exception(120)
        assert server.requests[-1].body["response_format"]["json_schema"]["schema"] == sent


def test_a_server_that_reads_a_schema_beside_json_object_gets_it_there() -> None:
    constraints = {"json_schema": "json_object"}
    with Server(lambda _: "[]") as server, gl.Runtime("m", base_url=server.url, capabilities=constraints) as runtime:
        runtime.submit(gl.Request("x", gl.SamplingParams(json_schema=list[int], max_tokens=8))).exception(120)
        schema = {"type": "array", "items": {"type": "integer"}}
        assert server.requests[-1].body["response_format"] == {"type": "json_object", "schema": schema}
