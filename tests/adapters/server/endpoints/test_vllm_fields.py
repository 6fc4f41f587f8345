"""vLLM's fields of a request, by what they change in the answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.served import Served

ASK = [{"role": "user", "content": "Mara is a baker. What is Mara?"}]


def chat(server: Served, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"messages": ASK, "max_tokens": 12, "temperature": 0, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()  # type: ignore[no-any-return]


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_bad_words_do_not_occur_however_they_are_tokenised(server: Served) -> None:
    assert text(chat(server)) == "baker"
    other = text(chat(server, bad_words=["baker", "is"]))
    assert other
    assert "baker" not in other
    assert "is" not in other
    error = chat(server, 400, bad_words=["baker"], regex="[a-z]+")["error"]
    assert "bad_words was given beside a constraint" in error["message"]


def test_only_allowed_token_ids_are_written_under_a_constraint_too(server: Served) -> None:
    (comma,) = httpx.post(f"{server.url}/tokenize", json={"prompt": "12"}).json()["tokens"][-1:]
    assert set(text(chat(server, allowed_token_ids=[comma], temperature=2))) == {"2"}
    assert text(chat(server, allowed_token_ids=[comma], regex="[0-9]{3}")) == "222"
    assert chat(server, 400, allowed_token_ids=[10**6])["error"]["param"] == "allowed_token_ids"
    assert "empty" in chat(server, 400, allowed_token_ids=[])["error"]["message"]


def test_a_stop_string_stays_and_special_tokens_show_where_asked_for(server: Served) -> None:
    assert text(chat(server, stop="ake")) == "b"
    kept = chat(server, stop="ake", include_stop_str_in_output=True)
    assert (text(kept), kept["choices"][0]["stop_reason"]) == ("bake", "ake")
    shown = text(chat(server, ignore_eos=True, skip_special_tokens=False))
    assert shown.startswith("baker<|im_end|>\n<|im_start|>")
    assert "<|im" not in text(chat(server, ignore_eos=True))


def test_prompt_logprobs_are_those_of_an_echo_in_both_endpoints(server: Served) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{server.url}{path}", json={"max_tokens": 1, "temperature": 0, **body}, timeout=60)

    ids = httpx.post(f"{server.url}/tokenize", json={"messages": ASK}).json()["tokens"]
    (echo,) = post("/v1/completions", prompt=ids, echo=True, logprobs=0).json()["choices"]
    expected = echo["logprobs"]["token_logprobs"][: len(ids)]
    (choice,) = post("/v1/completions", prompt=ids, prompt_logprobs=2).json()["choices"]
    for found in (choice["prompt_logprobs"], chat(server, prompt_logprobs=2)["prompt_logprobs"]):
        assert found[0] is expected[0] is None
        own = [entry[str(i)]["logprob"] for i, entry in zip(ids[1:], found[1:], strict=True)]
        assert own == pytest.approx(expected[1:], abs=1e-4)
        for entry in found[1:]:
            ranked = [one["logprob"] for one in entry.values() if one["rank"]]
            assert len(ranked) == 2
            assert ranked == sorted(ranked, reverse=True)
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": ASK})):
        refused = post(path, **prompt, prompt_logprobs=1, stream=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_a_prompt_is_cut_to_its_last_tokens(server: Served) -> None:
    assert chat(server, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
    body = {"prompt": [50, 51, 52, 53], "truncate_prompt_tokens": 2, "max_tokens": 1, "return_token_ids": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["prompt_token_ids"] == [52, 53]
    long = {"prompt": [50] * 9000, "truncate_prompt_tokens": -1, "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", json=long, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == 4095
    assert chat(server, 400, truncate_prompt_tokens=0)["error"]["param"] == "truncate_prompt_tokens"


def test_a_request_id_of_the_body_names_the_answer_and_the_header(server: Served) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": ASK, "request_id": "job-7"}, timeout=60
    )
    assert response.json()["id"] == "chatcmpl-job-7"
    assert response.headers["x-request-id"] == "job-7"
    assert chat(server, 400, request_id="a b")["error"]["param"] == "request_id"


def test_documents_reach_the_template_and_a_template_of_a_request_needs_trust(server: Served) -> None:
    assert text(chat(server, documents=[{"title": "a", "text": "b"}], priority=-3)) == "baker"  # its template has none
    assert "--trust-request-chat-template" in chat(server, 400, chat_template="{{ 1 }}")["error"]["message"]
