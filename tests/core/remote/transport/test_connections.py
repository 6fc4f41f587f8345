"""Connections are kept for later requests, and closed where none comes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import certifi
import openai
import pytest

import graftlm as gl
from graftlm.core.remote.config import EndpointConfig
from graftlm.core.remote.transport.connections import Connections, _tls_context
from tests.core.remote.models import writes
from tests.core.remote.server import Server

BODY = {"model": "m", "prompt": "go ", "max_tokens": 4}


def on(server: Server, act: Callable[[Connections], Awaitable[None]], **options: float) -> None:
    """Run `act` with connections to the server, and close them."""

    async def main() -> None:
        connections = Connections(EndpointConfig("m", server.url), **options)
        await act(connections)
        await connections.close()

    asyncio.run(main())
    server.wait_until(lambda s: s.num_open == 0)


async def ask(sdk: openai.AsyncOpenAI) -> None:
    await sdk.post("/completions", cast_to=object, body=BODY)


def test_requests_one_after_the_other_share_a_connection_and_each_at_once_has_its_own() -> None:
    with Server(writes("x"), seconds_per_call=0.1) as server, gl.Runtime("m", base_url=server.url) as rt:
        rt.generate("go ")
        rt.generate("go ")
        assert server.num_opened == 1
        rt.generate(["go ", "go ", "go "])
        assert server.num_opened == 3


def test_the_connection_that_was_used_last_is_used_first_and_unused_ones_are_closed() -> None:
    async def act(connections: Connections) -> None:
        first, second = connections.take(), connections.take()
        await ask(first)
        await ask(second)
        connections.give_back(first)
        assert server.num_open == 2
        connections.give_back(second)  # closes the first
        assert connections.take() is second
        await asyncio.to_thread(server.wait_until, lambda s: s.num_open == 1)
        await ask(second)
        assert server.num_opened == 2

    with Server(writes("x")) as server:
        on(server, act, kept_s=0.0)


def test_a_connection_in_use_is_closed_with_the_others_and_not_kept_afterwards() -> None:
    async def act(connections: Connections) -> None:
        client = connections.take()
        await ask(client)
        await connections.close()
        connections.give_back(client)
        assert connections.take() is not client

    with Server(writes("x")) as server:
        on(server, act)


def test_all_connections_trust_the_certificates_of_the_sdks_http_library() -> None:
    context = _tls_context(openai)
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_endpoints_share_their_certificates_until_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = "-----END CERTIFICATE-----\n"
    first, second, *_ = Path(certifi.where()).read_text().split(end)
    path = tmp_path / "trusted.pem"
    path.write_text(first + end)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    found = [_tls_context(openai), _tls_context(openai)]
    path.write_text(first + end + second + end)
    found.append(_tls_context(openai))
    monkeypatch.delenv("SSL_CERT_FILE")
    found.append(_tls_context(openai))
    assert all(isinstance(context, ssl.SSLContext) for context in found)
    assert [len(context.get_ca_certs()) for context in found[:3]] == [1, 1, 2]
    assert found[0] is found[1] and len({*map(id, found)}) == 3
