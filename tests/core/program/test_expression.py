from __future__ import annotations

from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError
from graftlm.core.program.expression import DATA_TYPES, Gen, RoleBegin, RoleEnd, Text, parts_of


def test_texts_and_expressions_join_in_order() -> None:
    expression = "a" + gl.gen("x") + "b" + gl.select("y", ["1", "2"])
    assert [type(part).__name__ for part in parts_of(expression)] == ["Text", "Gen", "Text", "Select"]


def test_a_turn_encloses_its_content() -> None:
    assert parts_of(gl.user("hi")) == (RoleBegin("user"), Text("hi"), RoleEnd("user"))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: gl.gen("x", max_token=3), "did you mean 'max_tokens'"),
        (lambda: gl.gen("x", max_tokens=0), "max_tokens is 0"),
        (lambda: gl.gen("x", temperature=-1), "temperature is -1"),
        (lambda: gl.gen("x", dtype=list), "use int, float, bool or str"),
        (lambda: gl.gen("x", choices="ab"), "a list of texts"),
        (lambda: gl.gen("x", choices=[]), "choices is empty"),
        (lambda: gl.gen("x", regex="a", choices=["a"]), "takes one constraint"),
        (lambda: gl.gen(3), "name of a variable is 3"),
        (lambda: gl.select("x", []), "choices is empty"),
        (lambda: gl.select("x", ["a", "a"]), "duplicates"),
        (lambda: gl.select("x", ["a"], method="best"), "method is 'best'"),
        (lambda: gl.video("x", 0), "num_frames is 0"),
        (lambda: gl.user(None), "None .NoneType. cannot be appended"),
        (lambda: gl.gen("x") + 3, "3 .int. cannot be appended"),
    ],
)
def test_mistakes_are_told_where_an_expression_is_built(build: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build()


def test_a_call_sets_parameters_over_the_programs() -> None:
    sampling = gl.gen("x", max_tokens=3).sampling({"max_tokens": 9, "temperature": 0.5})
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.5)


def test_a_data_type_is_a_constraint_unless_another_is_given() -> None:
    typed = gl.gen("x", dtype=int, stop=".").sampling({"grammar": "ignored"})
    assert typed.regex == DATA_TYPES[int].regex and typed.grammar is None
    assert set(typed.stop) >= {".", "\n", " "}
    own = gl.gen("x", dtype=int, regex="[1-5]")
    assert own.sampling({}).regex == "[1-5]" and own.value("4") == 4


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (int, "-12", -12),
        (float, "2.5", 2.5),
        (float, "3", 3.0),
        (bool, "True", True),
        (bool, "false", False),
        (str, '"a b"', "a b"),
    ],
)
def test_values_are_read_by_their_type(dtype: type, text: str, value: Any) -> None:
    read = Gen("x", dtype).value(text)
    assert read == value and type(read) is dtype


@pytest.mark.parametrize(("dtype", "text"), [(int, "-"), (str, '"a'), (str, '"'), (float, "")])
def test_a_text_that_is_no_value_is_told(dtype: type, text: str) -> None:
    with pytest.raises(ValueError):
        Gen("x", dtype).value(text)
