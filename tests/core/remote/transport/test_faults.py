"""What servers do wrong: every request ends with an answer or with an error that says what happened."""

from __future__ import annotations

import json
import time
from email.utils import formatdate
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import RemoteError
from graftlm.core.program.state import ProgramState
from graftlm.core.remote.transport.failures import retry_after_s
from tests.core.remote.models import answers, writes
from tests.core.remote.server import Fault, Server

CHAT = [{"role": "user", "content": "hello"}]
SOON = {"retry-after-ms": "1"}


def runtime(server: Server, **options: Any) -> gl.Runtime:
    return gl.Runtime("m", base_url=server.url, **options).load()


def test_the_wait_that_a_server_asks_for_is_read_in_each_form() -> None:
    now_s = 1_700_000_000.0
    assert retry_after_s({"retry-after-ms": "250", "retry-after": "9"}) == 0.25
    assert retry_after_s({"retry-after": "1.5"}) == 1.5
    assert retry_after_s({"retry-after": formatdate(now_s + 7, usegmt=True)}, now_s) == 7
    assert retry_after_s({"retry-after": formatdate(now_s - 7, usegmt=True)}, now_s) == 0
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_pass_is_asked_again(status: int) -> None:
    with Server(writes("x"), faults=[Fault(status, headers=SOON)] * 2) as server, runtime(server) as rt:
        done = rt.generate("go ")
        assert (done.text, done.usage.api_calls, done.usage.retries) == ("x", 1, 2)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, {"error": {"message": "bad field"}}, "answered 400: bad field"),
        (401, {"error": {"message": "bad key", "code": "invalid_api_key"}}, "401 invalid_api_key: bad key; check api_"),
        (403, {"message": "not allowed"}, "answered 403: not allowed; check what the key"),
        (422, {"detail": "Unexpected fields"}, "answered 422: Unexpected fields"),
        (429, {"error": {"message": "no money", "code": "insufficient_quota"}}, "no money; the account has no credit"),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, "context_length_exceeded: too"),
        (404, "<html>Not here</html>", "answered 404: <html>Not here</html>; check base_url"),
        (404, {"error": {"message": "no model m", "code": "model_not_found"}}, "no model m; check base_url"),
    ],
)
def test_what_will_not_pass_is_asked_once_and_quoted(status: int, body: Any, reason: str) -> None:
    with Server(answers({}), faults=[Fault(status, body=body)]) as server, runtime(server) as rt:
        with pytest.raises(RemoteError, match=reason) as caught:
            rt.generate(CHAT)
        assert (len(server.requests), caught.value.status) == (1, status)


def test_a_wait_that_is_too_long_is_told_and_not_taken() -> None:
    fault = Fault(429, headers={"retry-after": "3600"})
    with Server(writes("x"), faults=[fault]) as server, runtime(server) as rt:
        with pytest.raises(RemoteError, match="it asks to wait 3,600 s, and 120 s is the most") as caught:
            rt.generate("go ")
        assert (len(server.requests), caught.value.retry_after_s) == (1, 3600)


def test_a_server_that_says_not_to_ask_again_is_not_asked_again() -> None:
    fault = Fault(500, headers={"x-should-retry": "false"})
    with Server(writes("x"), faults=[fault]) as server, runtime(server) as rt:
        with pytest.raises(RemoteError, match="answered 500"):
            rt.generate("go ")
        assert len(server.requests) == 1


def test_a_reset_is_asked_again_and_named_in_the_end() -> None:
    with Server(writes("x"), faults=[Fault(reset=True)]) as server, runtime(server) as rt:
        assert rt.generate("go ").text == "x"
    with Server(writes("x"), faults=[Fault(reset=True)] * 9) as server, runtime(server, max_retries=1) as rt:
        with pytest.raises(RemoteError, match="cannot be reached"):
            rt.generate("go ")
        assert len(server.requests) == 2


def test_a_server_that_is_not_there_is_named() -> None:
    reason = r"http://127.0.0.1:9/v1 cannot be reached .*check base_url and that"
    with (
        gl.Runtime("m", base_url="http://127.0.0.1:9/v1", max_retries=0) as rt,
        pytest.raises(RemoteError, match=reason),
    ):
        rt.generate("go ")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(raw=b"<html>Welcome</html>", raw_type="text/html"), "answered with a page, not with JSON: '<html>Welc"),
        (Fault(raw=b'{"choices": [{'), "sent what is no JSON"),
        (Fault(raw=json.dumps({"error": {"message": "overloaded"}}).encode()), "overloaded"),
        (Fault(raw=b'{"object": "x"}'), "answered without choices"),
        (Fault(content=None), "answered no text"),
        (Fault(content=None, finish="content_filter"), "refused to answer"),
        (Fault(finish="error"), "ended its answer with finish_reason 'error'"),
    ],
)
def test_a_200_that_holds_no_answer_is_an_error_that_says_what_it_holds(fault: Fault, reason: str) -> None:
    faults = [fault] * 3
    with Server(answers({"hello": "Hi."}), faults=faults) as server, runtime(server, max_retries=0) as rt:
        with pytest.raises(RemoteError, match=reason):
            rt.generate(CHAT)
        assert len(server.requests) == 1  # it was computed, and may have been paid


@pytest.mark.parametrize("quiet", [True, False])
def test_a_stream_that_breaks_off_is_an_error_and_never_asked_again(quiet: bool) -> None:
    fault = Fault(cut_after=3, quiet=quiet)
    with Server(answers({"hello": "one two three"}), faults=[fault]) as server, runtime(server) as rt:
        stream = rt.stream(CHAT)
        with pytest.raises(RemoteError, match="without a finish_reason" if quiet else "broke its answer off"):
            list(stream)
        assert len(server.requests) == 1
        server.wait_until(lambda s: rt.usage.estimated == 1)


def test_a_stream_without_done_at_its_end_is_complete() -> None:
    with Server(answers({"hello": "one two"}), done=False) as server, runtime(server) as rt:
        assert "".join(chunk.text for chunk in rt.stream(CHAT)) == "one two"


def test_a_program_that_goes_on_after_a_failed_call_gets_its_cause_at_every_read() -> None:
    @gl.program(num_api_spec_tokens=32)
    def program(s: ProgramState) -> None:
        s += "A: " + gl.gen("a", stop=";") + "; B: " + gl.gen("b", stop=";")

    with Server(writes("x"), faults=[Fault(400, body={"detail": "no"})] * 9) as server, runtime(server) as rt:
        state = program.run(runtime=rt)
        for name in ("a", "b"):
            with pytest.raises(RemoteError, match="answered 400: no"):
                _ = state[name]
        assert state.usage.api_calls + state.usage.probe_calls == len(server.requests)


def test_a_slow_answer_meets_the_deadline_of_its_gen() -> None:
    @gl.program(temperature=0)
    def program(s: ProgramState) -> None:
        s += "A: " + gl.gen("a", timeout=0.2)

    with Server(writes("x"), seconds_per_call=60) as server, runtime(server) as rt:
        start_s = time.monotonic()
        state = program.run(runtime=rt)
        with pytest.raises(gl.RequestTimeout):
            _ = state["a"]
        assert time.monotonic() - start_s < 30
