"""Log-probabilities of an endpoint, in the shapes that servers give them."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.transport.answer import read_answers

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
