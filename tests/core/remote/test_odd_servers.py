"""Servers that answer in their own way: values are right, or an error says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import RemoteError
from graftlm.core.program.state import ProgramState
from tests.core.remote.models import answers, continues, follows_layout
from tests.core.remote.server import Fault, Server

FORM = "Name: Ann\nAge: 31\nCity: Bonn\n"
VALUES = {"name": "Ann", "age": 31, "city": "Bonn"}
SAID = answers({"1 to 20": "1 2 3 4 5 6 7 8 9 10", "Say hello": "hello", "Bonn": FORM})
CHAT = [{"role": "user", "content": "Ann, 31, of Bonn."}]

Change = Callable[[dict[str, Any]], None]


def fill(s: ProgramState) -> None:
    s += "Name: " + gl.gen("name", stop="\n", max_tokens=8) + "\nAge: " + gl.gen("age", dtype=int, max_tokens=8)
    s += "\nCity: " + gl.gen("city", stop="\n", max_tokens=8) + "\n"


def chat(s: ProgramState) -> None:
    s += gl.user(CHAT[0]["content"])
    with s.assistant():
        fill(s)


def choices(change: Change) -> Callable[[dict[str, Any]], Any]:
    """Change every choice of a body or a piece."""

    def edit(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body.get("choices") or ():
            change(choice)
        return body

    return edit


def messages(change: Change) -> Callable[[dict[str, Any]], Any]:
    """Change every message, or the part of one in a stream."""
    return choices(lambda choice: [change(choice[k]) for k in ("message", "delta") if choice.get(k)] and None)


def ends_with(reason: Any) -> dict[str, Any]:
    return {"edit": choices(lambda c: c.update(finish_reason=reason) if c.get("finish_reason") else None)}


def usage(given: Any) -> dict[str, Any]:
    return {"edit": lambda body: body | {"usage": given} if body.get("usage") else body}


def in_parts(message: dict[str, Any]) -> None:
    if message.get("content"):
        message["content"] = [{"type": "text", "text": message["content"]}, {"type": "other"}]


def without_usage_choices(body: dict[str, Any]) -> dict[str, Any]:
    return body if body.get("choices") else body | {"choices": None}


ODD: dict[str, dict[str, Any]] = {
    "ignores stop strings": {"drops": ("stop",)},
    "ignores the limit": {"drops": ("max_tokens",)},
    "ignores both": {"drops": ("stop", "max_tokens")},
    "keeps the stop in the text": {"keeps_stop": True},
    "gives content in parts": {"edit": messages(in_parts)},
    "adds thoughts": {"edit": messages(lambda m: m.update(reasoning_content="Hm.", role="model"))},
    "adds fields": {"edit": lambda body: body | {"id": None, "object": 7, "model": None, "x": {"y": []}}},
    "always says stop": ends_with("stop"),
    "always says length": ends_with("length"),
    "says eos_token": ends_with("eos_token"),
    "says STOP": ends_with("STOP"),
    "says a number": ends_with(7),
    "reports no usage": {"usage": "absent"},
    "reports usage as null": {"usage": "null"},
    "reports usage as text": usage({"prompt_tokens": "12", "completion_tokens": None}),
    "reports zeros": usage({"prompt_tokens": 0, "completion_tokens": 0}),
    "reports floats": usage({"prompt_tokens": 12.0, "completion_tokens": 3.0}),
    "ends with null choices": {"edit": without_usage_choices},
    "gives no index": {"edit": choices(lambda c: c.pop("index", None))},
    "gives null logprobs": {"edit": choices(lambda c: c.update(logprobs={"content": None, "tokens": None}))},
    "gives one answer for n": {"n": False},
    "refuses n": {"refuses": {"n": "Unsupported value: 'n' must be 1"}},
    "refuses stop": {"refuses": {"stop": "Unsupported parameter: 'stop' is not supported with this model."}},
    "wants the new limit": {"refuses": {"max_tokens": "max_tokens is deprecated; use max_completion_tokens."}},
    "refuses stream_options": {"refuses": {"stream_options": "Unrecognized request argument: stream_options"}},
    "never streams": {"streams": False},
    "sends no [DONE]": {"done": False},
    "refuses prefill": {"continue_turn": "none", "trailing": "refused"},
    "begins a new turn": {"continue_turn": "none"},
    "refuses unknown fields": {"continue_turn": "none", "unknown": "refused"},
}


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ODD[request.param]


@pytest.mark.parametrize("num_spec_tokens", [None, 7, 64])
def test_programs_have_the_right_values(odd: dict[str, Any], num_spec_tokens: int | None) -> None:
    continues_turns = odd.get("continue_turn") != "none"
    said = SAID if continues_turns else follows_layout({k: str(v) for k, v in VALUES.items()})
    for function, model in ((fill, continues(FORM)), (chat, said)):
        program = gl.program(num_api_spec_tokens=num_spec_tokens, temperature=0)(function)
        with Server(model, **odd) as server, gl.Runtime("m", base_url=server.url) as rt:
            assert program.run(runtime=rt).variables == VALUES
            usage = rt.usage
            assert usage.api_calls + usage.probe_calls + usage.retries == len(server.calls)
            if num_spec_tokens == 64:
                stream = program.stream(runtime=rt)
                assert "".join(chunk.text for chunk in stream) == "Ann31Bonn"


def test_answers_and_streams_are_right(odd: dict[str, Any]) -> None:
    with Server(SAID, **odd) as server, gl.Runtime("m", base_url=server.url) as rt:
        assert rt.generate(CHAT, temperature=0).text == FORM
        assert rt.generate(CHAT, temperature=0, stop="\nAge").text == "Name: Ann"
        assert "".join(chunk.text for chunk in rt.stream(CHAT, temperature=0, stop="\nAge")) == "Name: Ann"
        assert [one.text for one in rt.generate(CHAT, n=3).completions] == [FORM] * 3
        texts = ["", "", ""]
        for chunk in rt.stream(CHAT, n=3):
            texts[chunk.index] += chunk.text
        assert texts == [FORM] * 3
        assert rt.usage.api_calls + rt.usage.retries == len(server.calls)


def test_what_a_refusal_tells_is_remembered() -> None:
    refuses = {
        "stop": "Unsupported parameter: 'stop' is not supported",
        "max_tokens": "Use 'max_completion_tokens'",
        "temperature": "`temperature` is deprecated for this model",
    }
    with Server(SAID, refuses=refuses) as server, gl.Runtime("m", base_url=server.url) as rt:
        for _ in range(2):
            assert rt.generate(CHAT, stop="\n", max_tokens=50).text == "Name: Ann"
        assert (rt.usage.api_calls, rt.usage.retries, len(server.calls)) == (2, 3, 5)
        with pytest.raises(RemoteError, match="answered 400: `temperature` is deprecated .*; change what it refuses"):
            rt.generate(CHAT, temperature=0.5)  # left out, it would change the answer


def test_a_limit_that_is_out_of_range_is_not_taken_for_another_name() -> None:
    told = {"max_tokens": "max_tokens is too large: 9000. This model supports at most 4096 completion tokens"}
    with Server(SAID, refuses=told) as server, gl.Runtime("m", base_url=server.url) as rt:
        with pytest.raises(RemoteError, match="is too large: 9000"):
            rt.generate(CHAT, max_tokens=9000)
        assert len(server.calls) == 1


def test_more_stop_strings_than_are_taken_are_cut_here() -> None:
    told = {"error": {"message": "Invalid 'stop': array too long. Expected an array with maximum length 4"}}
    with Server(SAID, faults=[Fault(400, body=told)]) as server, gl.Runtime("m", base_url=server.url) as rt:
        stops = ["a1", "b1", "c1", "d1", "\nCity", "e1"]
        assert rt.generate(CHAT, stop=stops).text == rt.generate(CHAT, stop=stops).text == "Name: Ann\nAge: 31"
        assert [len(request.body["stop"]) for request in server.calls] == [6, 4, 4]


@pytest.mark.parametrize("manner", ["prefix", "bare"])
def test_a_turn_that_comes_back_with_its_beginning_is_gone_on_with(manner: str) -> None:
    """As Mistral's does: what was given stands at the head of the answer."""
    begun = ""

    def remember(body: dict[str, Any]) -> None:
        nonlocal begun
        last = body["messages"][-1]
        begun = last["content"] if last["role"] == "assistant" else ""

    def give_back(message: dict[str, Any]) -> None:
        message["content"] = begun + message["content"]

    program = gl.program(num_api_spec_tokens=32, temperature=0)(chat)
    options = {"continue_turn": manner, "hear": remember, "edit": messages(give_back)}
    with Server(SAID, **options) as server, gl.Runtime("m", base_url=server.url) as rt:
        assert program.run(runtime=rt).variables == VALUES
        assert rt._source.endpoint.capabilities.returns_text is True


@pytest.mark.parametrize("preamble", ["assistant\n", "<think>\nName or age?\n</think>\n\n", "Sure! Here it is:\n"])
@pytest.mark.parametrize("num_spec_tokens", [None, 64])
def test_what_stands_before_a_form_is_let_pass(preamble: str, num_spec_tokens: int | None) -> None:
    program = gl.program(num_api_spec_tokens=num_spec_tokens, temperature=0)(chat)
    model = follows_layout({k: str(v) for k, v in VALUES.items()})
    before = messages(lambda m: m.update(content=preamble + m["content"]))
    with (
        Server(model, continue_turn="none", edit=before) as server,
        gl.Runtime("m", base_url=server.url, capabilities={"continue_turn": "none"}) as rt,
    ):
        assert program.run(runtime=rt).variables == VALUES


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (Fault(raw=b"<html>Log in</html>", raw_type="text/html"), "answered .*<html>Log in</html>.*; check that it is"),
        (Fault(raw=b'{"error": {"message": "busy"}}'), "answered an error: busy; ask again later"),
        (Fault(raw=b""), "; check that it is an OpenAI-compatible API"),
        (Fault(404, body="<html>nothing here</html>"), "answered 404: <html>nothing here</html>; check base_url"),
    ],
)
def test_a_page_is_an_error_that_shows_it(page: Fault, reason: str, stream: bool) -> None:
    program = gl.program(temperature=0)(chat)
    known = {"continue_turn": "bare"}
    with Server(SAID, faults=[page] * 9) as server, gl.Runtime("m", base_url=server.url, capabilities=known) as rt:
        with pytest.raises(RemoteError, match=reason):
            _ = list(rt.stream(CHAT)) if stream else rt.generate(CHAT)
        with pytest.raises(RemoteError, match=f"gen 'name': .*{reason}"):
            _ = list(program.stream(runtime=rt)) if stream else program.run(runtime=rt)["name"]
        assert len(server.calls) == 2
