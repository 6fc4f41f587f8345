from __future__ import annotations

import asyncio
import copy
import logging
import pickle
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import ConfigError, EngineError, RemoteError, RequestCancelled, RequestTimeout
from tests.core.remote.models import answers, continues, writes
from tests.core.remote.server import Fault, Server

KEY = "sk-never-show-me"


def runtime(server: Server, **options: Any) -> gl.Runtime:
    return gl.Runtime("m", base_url=server.url, api_key=KEY, **options).load()


# -- answers ---------------------------------------------------------------------------------------------------------


def test_text_goes_to_completions_and_messages_to_chat() -> None:
    with Server(answers({"capital": "Paris."})) as server, runtime(server) as rt:
        assert rt.generate([{"role": "user", "content": "The capital?"}]).text == "Paris."
    with Server(continues("One two three")) as server, runtime(server) as rt:
        done = rt.generate("One two", max_tokens=2, temperature=0)
        assert (done.text, done.finish_reason) == (" three", "length")
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.api_calls) == (3, 2, 1)
        assert [r.path for r in server.requests] == ["/v1/completions"]


def test_a_list_of_prompts_gives_a_list_in_order() -> None:
    with Server(continues(*(f"{i} is {i}." for i in range(40)))) as server, runtime(server, max_in_flight=8) as rt:
        assert [d.text for d in rt.generate([f"{i} is " for i in range(40)])] == [f"{i}." for i in range(40)]
        assert server.most_in_flight <= 8


async def test_async_calls_and_streams() -> None:
    with Server(continues("a b c d")) as server, runtime(server) as rt:
        done = await asyncio.gather(*(rt.agenerate("a b") for _ in range(5)))
        assert {d.text for d in done} == {" c d"}
        assert "".join([chunk.text async for chunk in rt.astream("a b")]) == " c d"


def test_a_stream_brings_pieces_a_reason_and_usage() -> None:
    with Server(answers({"go": "one, two; three"})) as server, runtime(server) as rt:
        chunks = list(rt.stream([{"role": "user", "content": "go"}], stop=";"))
    assert "".join(chunk.text for chunk in chunks) == "one, two"
    assert (chunks[-1].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_that_the_server_leaves_in_the_text_is_cut(stream: bool) -> None:
    with Server(continues("Age: 31\nCity"), keeps_stop=True) as server, runtime(server) as rt:
        if stream:
            assert "".join(chunk.text for chunk in rt.stream("Age: ", stop="\n")) == "31"
        else:
            done = rt.generate("Age: ", stop="\n")
            assert (done.text, done.stop) == ("31", "\n")


@pytest.mark.parametrize("takes_n", [True, False])
def test_several_answers_come_even_from_a_server_that_gives_one_at_a_time(takes_n: bool) -> None:
    with Server(writes("x"), n=takes_n) as server, runtime(server) as rt:
        for _ in range(2):
            done = rt.generate("go ", n=3)
            assert [one.text for one in done.completions] == ["x", "x", "x"]
        assert len(server.calls) == (2 if takes_n else 6)  # the second time nobody asks for three at once
        assert rt.stats().requests == len(server.calls)


def test_logprobs_come_with_their_tokens() -> None:
    with Server(writes("a b")) as server, runtime(server) as rt:
        done = rt.generate("go ", logprobs=True)
        assert [(t.token, t.logprob) for t in done.logprobs] == [("a", -0.5), (" ", -0.5), ("b", -0.5)]


# -- ending ----------------------------------------------------------------------------------------------------------


def test_cancelling_closes_the_connection() -> None:
    with Server(writes("x"), seconds_per_call=60) as server, runtime(server) as rt:
        future = rt.submit(gl.Request("go"))
        server.wait_until(lambda s: len(s.requests) == 1)
        future.cancel()
        server.wait_until(lambda s: s.requests[0].closed_by_client)


def test_closing_a_stream_closes_the_connection_and_counts_what_came() -> None:
    with Server(writes("word " * 500), seconds_per_token=0.01) as server, runtime(server) as rt:
        stream = rt.stream("go: ", max_tokens=1000)
        assert next(stream).text == "word"
        stream.close()
        server.wait_until(lambda s: s.requests[0].closed_by_client)
        server.wait_until(lambda s: rt.usage.estimated == 1)
        assert rt.usage.completion_tokens > 0


def test_closing_the_runtime_ends_what_runs() -> None:
    with Server(writes("x"), seconds_per_call=60) as server:
        rt = runtime(server)
        future = rt.submit(gl.Request("go"))
        server.wait_until(lambda s: len(s.requests) == 1)
        rt.close()
        with pytest.raises(EngineError, match="closed before the request finished"):
            future.result(120)
        with pytest.raises(EngineError, match="closed"):
            rt.generate("go")


def test_a_timeout_holds_for_all_attempts_together() -> None:
    with Server(writes("x"), seconds_per_call=60) as server, runtime(server) as rt:
        with pytest.raises(RequestTimeout, match="within the request's timeout"):
            rt.generate("go", timeout=1.0)  # long enough to arrive there on a busy machine
        server.wait_until(lambda s: s.requests[0].closed_by_client)


def test_a_request_that_times_out_is_repeated_once() -> None:
    with Server(writes("x"), faults=[Fault(after_s=60)]) as server, runtime(server, timeout=1.0) as rt:
        assert rt.generate("go ").text == "x"
        assert (rt.usage.api_calls, rt.usage.retries) == (1, 1)
    with Server(writes("x"), seconds_per_call=60) as server, runtime(server, timeout=1.0, retry_timeouts=0) as rt:
        with pytest.raises(RemoteError, match="did not answer within 1 s; raise timeout="):
            rt.generate("go ")
        assert len(server.requests) == 1


async def test_a_cancelled_task_closes_its_connections() -> None:
    with Server(writes("x"), seconds_per_call=60) as server, runtime(server) as rt:
        task = asyncio.create_task(rt.agenerate(["a", "b"]))
        while len(server.requests) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not all(r.closed_by_client for r in server.requests):
            await asyncio.sleep(0.001)


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_text_log_or_pickle(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    echo = Fault(401, body={"error": {"message": f"Incorrect API key provided: {KEY}"}})
    with Server(writes("x"), faults=[echo]) as server, runtime(server) as rt:
        with pytest.raises(RemoteError, match=r"answered 401.*provided: \*\*\*.*GRAFTLM_API_KEY") as caught:
            rt.generate("go ")
        error: BaseException | None = caught.value
        while error is not None:  # what is chained may hold the request, and its headers the key
            assert not hasattr(error, "request") and KEY not in repr(vars(error)) + str(error)
            error = error.__cause__ or error.__context__
        assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
        monkeypatch.setenv("GRAFTLM_API_KEY", "another")
        data = pickle.dumps(rt)
        assert KEY.encode() not in data and KEY not in repr(rt) + repr(rt._source.endpoint.config) + caplog.text
        with pickle.loads(data) as again:
            assert again.generate("go ").text == "x"
            assert server.requests[-1].headers["authorization"] == "Bearer another"
    assert copy.deepcopy(rt) is rt


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"base_url": "api.example.com/v1"}, "without http:// or https:// and a host"),
        ({"base_url": "https://user:pw@example.com/v1"}, "holds a user name, a password or a query"),
        ({"base_url": "https://api.example.com/v1"}, "no API key for https://api.example.com/v1; give api_key="),
        ({"api_key": "x"}, "an api_key was given without base_url; give base_url=, or set GRAFTLM_BASE_URL"),
        ({"base_url": "http://localhost/v1", "dtype": "float32", "max_batch": 2}, "dtype, max_batch: for models in"),
        ({"base_url": "http://localhost/v1", "max_in_flght": 2}, "did you mean 'max_in_flight'"),
        ({"base_url": "http://localhost/v1", "max_in_flight": 0}, "max_in_flight is 0; it must be"),
        ({"base_url": "http://localhost/v1", "budget": {"call": 1}}, "unknown budget 'call'; did you mean 'calls'"),
        ({"base_url": "http://localhost/v1", "prices": {"input": 1}}, "give both 'input' and 'output'"),
        ({"base_url": "http://localhost/v1", "capabilities": {"n": "yes"}}, "the capability n is 'yes'"),
        ({"base_url": "http://localhost/v1", "capabilities": {"steam": True}}, "unknown capability 'steam'"),
        ({"base_url": "http://localhost/v1", "api_key": "k-1\n"}, "^api_key holds a line break, .* may need strip"),
        ({"base_url": "http://localhost/v1", "headers": {"a": 1}}, "the header 'a' is a int; it must be text"),
        ({"base_url": "http://localhost/v1", "headers": {"a": "ä"}}, "the header 'a' holds .* beyond ASCII"),
    ],
)
def test_wrong_options_are_told_at_once(
    arguments: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAFTLM_API_KEY", raising=False)
    monkeypatch.delenv("GRAFTLM_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match=reason):
        gl.Runtime("m", **arguments)


def test_what_only_a_model_in_this_process_can_do_is_an_error_that_says_so() -> None:
    with Server(writes("x")) as server, runtime(server) as rt:
        with pytest.raises(RemoteError, match="gives neither logits nor scores"):
            rt.warm("prefix")
        with pytest.raises(ConfigError, match="the tokenizer of 'm' at .* is not known; give tokenizer="):
            rt.score("a", "b")
        with pytest.raises(ConfigError, match="max_tokens is None"):
            rt.generate("a", max_tokens=None)
        assert server.requests == []


def test_what_no_request_can_hold_is_told_and_not_sent() -> None:
    with Server(writes("x")) as server, runtime(server) as rt, runtime(server, extra_body={"a": object()}) as odd:
        with pytest.raises(RemoteError, match="holds what JSON cannot write .*object is not JSON serializable"):
            odd.generate("a")
        with pytest.raises(RemoteError, match=r"holds a lone surrogate \('\\ud800'\), which UTF-8 cannot write; read"):
            rt.generate("a\ud800")
        assert server.requests == []


def test_cancelled_requests_say_so_to_a_stream() -> None:
    with Server(writes("x"), seconds_per_call=60) as server, runtime(server) as rt:
        stream = rt.submit_stream(gl.Request("go"))
        server.wait_until(lambda s: len(s.requests) == 1)
        stream._cancel()
        with pytest.raises(RequestCancelled):
            next(stream)
