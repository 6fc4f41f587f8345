"""Log-probabilities of an endpoint, in the shapes that servers give them."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.errors import RemoteError
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.transport.answer import StreamedAnswers, read_answers

CONFIG = EndpointConfig("m", base_url="http://127.0.0.1:1/v1")


def tokens_of(entry: dict[str, Any]) -> Any:
    choice = {"message": {"content": "x"}, "finish_reason": "stop", "logprobs": {"content": [entry]}}
    (answer,) = read_answers({"choices": [choice]}, CONFIG)
    assert answer.logprobs is not None
    return answer.logprobs[0]


def test_bytes_that_an_endpoint_states_used_to_be_replaced_by_those_of_the_text() -> None:
    top = [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0]}, {"token": "y", "logprob": -1.0, "bytes": None}]
    token = tokens_of({"token": "\ufffd", "logprob": -0.5, "bytes": [0xF0], "top_logprobs": top})
    assert token.data == b"\xf0"
    assert [one.data for one in token.candidates] == [b"\xf0", b"\xf0", b"y"]


@pytest.mark.parametrize("given", [None, "ab", 10**12, [256], [-1], ["a"], {}])
def test_bytes_that_are_none_are_those_of_the_text(given: Any) -> None:
    assert tokens_of({"token": "é", "logprob": 0.0, "bytes": given}).data == "é".encode()


@pytest.mark.parametrize(
    "choice",
    [
        {"index": "s", "delta": {"content": "a"}},
        {"index": [], "delta": {}},
        {"index": 0, "delta": {"tool_calls": [7]}},
        {"index": 0, "delta": {"tool_calls": [{"index": "b"}, {"index": 0}]}},
        {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": "f"}]}},
        {"index": 0, "delta": {}, "logprobs": {"content": [3]}},
    ],
)
def test_a_piece_of_another_form_used_to_raise_errors_of_python(choice: dict[str, Any]) -> None:
    with pytest.raises(RemoteError, match="not of the API's form"):
        StreamedAnswers(1).push({"choices": [choice]})
    assert StreamedAnswers(1).push({"choices": [{"index": -1, "delta": {"content": "a"}}]}) == []


def test_log_probs_that_are_a_list_in_one_piece_and_a_number_in_another_are_those_of_the_list() -> None:
    streamed = StreamedAnswers(1)
    entry = {"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    streamed.push(
        {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry], "refusal": 7}}]}
    )
    streamed.push(
        {"choices": [{"index": 0, "delta": {"content": "b"}, "logprobs": {"content": None, "refusal": [entry]}}]}
    )
    assert streamed.body["choices"][0]["logprobs"] == {"content": [entry], "refusal": [entry]}
