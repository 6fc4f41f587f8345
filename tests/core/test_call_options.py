"""Keywords of adapters, sorted and merged."""

from __future__ import annotations

from typing import Any

import pytest

import graftlm as gl
from graftlm.core import call_options
from graftlm.core.errors import ConfigError


def test_an_adapters_own_name_wins_over_a_runtime_option() -> None:
    given = {"cache": False, "dtype": "float32", "echo": True}
    assert call_options.sort_keywords(given, {"cache", "echo"}, "Model") == (
        {"cache": False, "echo": True},
        {"dtype": "float32"},
    )


@pytest.mark.parametrize(("given", "meant"), [("eko", "echo"), ("dtyp", "dtype"), ("api_kee", "api_key")])
def test_a_misspelt_keyword_suggests_the_adapters_names_and_the_runtimes(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown Model parameter '{given}'; did you mean '{meant}'"):
        call_options.sort_keywords({given: 1}, {"echo"}, "Model")


def test_keywords_of_a_function_leave_out_its_collecting_parameters() -> None:
    def call(self: Any, a: int, *rest: int, b: int = 1, **options: int) -> None: ...

    assert call_options.keywords_of(call, lambda c: None) == {"a", "b", "c"}


def test_what_is_no_runtime_is_refused() -> None:
    with pytest.raises(ConfigError, match="runtime is 'sprout'; give a graftlm.Runtime"):
        call_options.check_given("sprout", {})


def test_a_runtime_takes_no_options_beside_it() -> None:
    with pytest.raises(ConfigError, match="together with device, dtype"):
        call_options.check_given(gl.Runtime("sprout"), {"dtype": "float32", "device": "cpu"})


def test_later_sampling_parameters_win_and_none_is_the_default() -> None:
    params = call_options.sampling_params({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.0, "top_p": None})
    assert params == gl.SamplingParams(max_tokens=None, temperature=0.0)


def test_asking_for_top_logprobs_asks_for_logprobs() -> None:
    assert call_options.sampling_params({"top_logprobs": 3}).logprobs


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}, {"type": "array"}),
        ({"type": "json_schema", "schema": {"type": "array"}}, {"type": "array"}),
        ({"properties": {}}, {"properties": {}}),
        (int, {"type": "integer"}),
    ],
)
def test_the_schema_of_each_response_format(response_format: Any, schema: Any) -> None:
    assert call_options.answer_schema(response_format, lambda kind: {"type": "integer"}) == schema


def test_an_unknown_response_format_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"response_format\.shema is unknown; did you mean 'schema'\?"):
        call_options.answer_schema({"type": "json_schema", "shema": {}}, lambda kind: {})
    with pytest.raises(ConfigError, match="response_format is 'xml'; give"):
        call_options.answer_schema("xml", lambda kind: {})
