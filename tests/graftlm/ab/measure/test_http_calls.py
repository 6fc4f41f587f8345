"""Real clients ask a server on 127.0.0.1, which counts for itself."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from graftlm.ab.measure.http_calls import HttpCalls, usage_of
from tests.core.remote.models import answers
from tests.core.remote.server import Fault, Server

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS: Any = {"model": "m", "messages": CHAT, "max_tokens": 8, "temperature": 0}
STREAM: Any = OPTIONS | {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True)
def _clients_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    import dspy._vendor.lm15.transports as lm15
    import httpx
    import requests

    places = [
        (httpx.Client, "send"), (httpx.AsyncClient, "send"), (requests.Session, "send"),
        (lm15.StdlibTransport, "stream"), (lm15.StdlibAsyncTransport, "_do_stream"),
    ]  # fmt: skip
    for owner, name in places:
        monkeypatch.setattr(owner, name, getattr(owner, name))


def openai(url: str) -> None:
    with importlib.import_module("openai").OpenAI(base_url=url, api_key="none") as client:
        client.chat.completions.create(**OPTIONS)


def openai_stream(url: str) -> None:
    with importlib.import_module("openai").OpenAI(base_url=url, api_key="none") as client:
        assert len(list(client.chat.completions.create(**STREAM))) > 1


def openai_async(url: str) -> None:
    async def ask() -> None:
        async with importlib.import_module("openai").AsyncOpenAI(base_url=url, api_key="none") as client:
            await client.chat.completions.create(**OPTIONS)

    asyncio.run(ask())


def openai_async_stream(url: str) -> None:
    async def ask() -> None:
        async with importlib.import_module("openai").AsyncOpenAI(base_url=url, api_key="none") as client:
            assert len([piece async for piece in await client.chat.completions.create(**STREAM)]) > 1

    asyncio.run(ask())


def dspy(url: str) -> None:
    lm = importlib.import_module("dspy").LM("openai/m", api_base=url, api_key="none", cache=False)
    lm("What is the capital of France?")
    lm.close()


def dspy_async(url: str) -> None:
    async def ask() -> None:
        lm = importlib.import_module("dspy").LM("openai/m", api_base=url, api_key="none", cache=False)
        await lm.acall("What is the capital of France?")
        await lm.aclose()

    asyncio.run(ask())


def requests(url: str) -> None:
    importlib.import_module("requests").post(f"{url}/chat/completions", json=OPTIONS, timeout=120).raise_for_status()


ASK = [openai, openai_stream, openai_async, openai_async_stream, dspy, dspy_async, requests]


@pytest.mark.parametrize("ask", ASK, ids=lambda ask: ask.__name__)
def test_calls_and_tokens_of_every_client_equal_the_servers_own(ask: Callable[[str], None]) -> None:
    begun: list[float] = []
    calls = HttpCalls(begun.append)
    with Server(answers({"France": "Paris, of course."})) as server:
        ask(server.url)  # imports the client
        calls.hook()
        calls.hook()
        ask(server.url)
        served = server.calls[-1]
    assert (calls.num, len(begun), len(server.calls)) == (1, 1, 2)
    assert calls.total("prompt") == served.prompt_tokens > 0
    assert calls.total("completion") == served.completion_tokens > 0


def test_a_stream_that_is_given_up_is_a_call_of_the_round_in_which_it_began() -> None:
    """It was counted when Python collected it, in a later round."""
    calls = HttpCalls(lambda begin: None)
    with Server(answers({"France": "Paris, of course."})) as server:
        client = importlib.import_module("openai").OpenAI(base_url=server.url, api_key="none")
        calls.hook()
        stream = client.chat.completions.create(**STREAM)
        next(iter(stream))
        assert (calls.num, calls.under_way, calls.total("prompt")) == (1, 1, None)
        calls.reset()
        assert (calls.num, calls.under_way) == (0, 0)
        stream.close()
        assert calls.num == 0
        with client.chat.completions.create(**STREAM) as stream:
            next(iter(stream))
        assert (calls.num, calls.under_way) == (1, 0)
        client.close()


def test_a_request_without_an_answer_yet_is_under_way() -> None:
    calls = HttpCalls(lambda begin: None)
    seen: list[int] = []
    with (
        Server(answers({"France": "Paris."})) as server,
        importlib.import_module("openai").OpenAI(base_url=server.url, api_key="none") as client,
    ):
        calls.hook()
        client._client.event_hooks = {"request": [lambda request: seen.append(calls.under_way)]}
        client.chat.completions.create(**OPTIONS)
    assert (seen, calls.under_way) == ([1], 0)


def test_requests_that_failed_are_no_calls() -> None:
    calls = HttpCalls(lambda begin: None)
    with Server(answers({"France": "Paris."}), faults=[Fault(status=503)]) as server:
        importlib.import_module("openai")
        calls.hook()
        openai(server.url)  # tries again by itself
        assert (len(server.calls), calls.num, calls.refused) == (2, 1, {503: 1})
    calls.reset()
    assert calls.refused == {}


def test_a_sum_is_unknown_where_one_answer_does_not_tell_it() -> None:
    calls = HttpCalls(lambda begin: None)
    with (
        Server(answers({"France": "Paris."})) as telling,
        Server(answers({"France": "Paris."}), usage="absent") as mute,
    ):
        importlib.import_module("openai")
        calls.hook()
        openai(telling.url)
        assert calls.total("prompt") == telling.calls[0].prompt_tokens
        openai(mute.url)
    assert (calls.num, calls.total("prompt")) == (2, None)
    calls.reset()
    assert calls.num == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"usage": {"prompt_tokens": 5, "completion_tokens": 2}}', (5, None, 2)),
        (b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}}', (5, 3, None)),
        (b'{"usage": {"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 2}}', (12, 7, 2)),
        (b'data: {"a": 1}\n\ndata: {"usage": {"prompt_tokens": 5}}\n\ndata: [DONE]\n\n', (5, None, None)),
        (b'event: x\ndata: {"response": {"usage": {"input_tokens": 5, "output_tokens": 2}}}\n\n', (5, None, 2)),
        (b"data: {cut off", (None, None, None)),
        (b"[1]", (None, None, None)),
    ],
)
def test_usage_is_read_as_each_api_writes_it(body: bytes, expected: tuple[int | None, ...]) -> None:
    assert tuple(usage_of(body).values()) == expected
