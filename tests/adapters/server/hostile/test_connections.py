"""Heads and bodies that never end, and many connections, cost other clients nothing; no key is needed to send them."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

from tests.adapters.server.hostile.conftest import CHAT, answer_of, connect, post, steady
from tests.served import Served

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def send(connection: socket.socket, data: bytes) -> None:
    """Send as much as the server takes."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


@pytest.mark.parametrize(
    "head",
    [
        b"x-long: " + b"a" * (20 << 20),
        b"".join(b"x-%d: b\r\n" % i for i in range(100_000)),
        b"x-long: " + b"a" * (64 << 10) + b"\r\n\r\n",
        b"".join(b"x-%d: b\r\n" % i for i in range(300)) + b"\r\n",
    ],
    ids=["a header without an end", "headers without an end", "a long header", "300 headers"],
)
def test_headers_beyond_the_limits_get_431(guarded: Served, head: bytes) -> None:
    with steady(guarded), connect(guarded) as connection:
        send(connection, HEAD + head)
        answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_headers_within_the_limits_are_read(guarded: Served) -> None:
    long = {f"x-{i}": "a" * 250 for i in range(200)}
    assert httpx.get(f"{guarded.url}/health", headers=long).status_code == 200
    assert httpx.get(f"{guarded.url}/health", headers={"x-long": "a" * 60_000}).status_code == 200


def test_a_head_in_single_bytes_is_read(guarded: Served) -> None:
    with connect(guarded) as connection:
        for byte in b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n":
            connection.sendall(bytes([byte]))
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")


def test_a_request_behind_a_large_one_on_the_same_connection_is_read(guarded: Served) -> None:
    body = json.dumps(CHAT | {"metadata": {"filler": "x" * 300_000}}).encode()
    first = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    with connect(guarded) as connection:
        connection.sendall(first + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert answer_of(connection).count(b"HTTP/1.1 200 ") == 2


def test_half_sent_heads_end_in_time(guarded: Served) -> None:
    with steady(guarded), connect(guarded) as silent, connect(guarded) as slow:
        slow.sendall(HEAD)
        for connection in (silent, slow):
            answer = answer_of(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"header_timeout" in answer


def test_half_sent_bodies_end_in_time_and_their_memory_is_bounded(guarded: Served) -> None:
    piece = b" " * (4 << 20)
    connections = [connect(guarded) for _ in range(15)]
    with steady(guarded):
        for connection in connections:
            send(connection, HEAD + b"content-length: 30000000\r\n\r\n" + piece)
        answers = [answer_of(connection).split()[1] for connection in connections]
    for connection in connections:
        connection.close()
    assert set(answers) == {b"408", b"429"}


def test_chunks_of_more_framing_than_content_are_refused(guarded: Served) -> None:
    with steady(guarded), connect(guarded) as connection:
        send(connection, HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1;" + b"x" * (1 << 20))
        assert b" 431 " in answer_of(connection)[:16]


def test_more_connections_than_one_client_may_have_close_the_oldest_that_wait(guarded: Served) -> None:
    connections = []
    with steady(guarded) as count:
        for _ in range(300):
            connections.append(connect(guarded))
            send(connections[-1], HEAD)
        before, end_s = count(), time.monotonic() + 120
        while count() < before + 5:
            assert time.monotonic() < end_s
            time.sleep(0.01)
    for connection in connections:
        connection.close()


def test_a_body_too_long_is_refused_before_it_is_sent(guarded: Served) -> None:
    with steady(guarded), connect(guarded) as connection:
        connection.sendall(HEAD + b"content-length: 300000000\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_empty_lines_before_a_head_count_as_part_of_it(guarded: Served) -> None:
    with steady(guarded), connect(guarded) as connection:
        send(connection, b"\r\n" * (1 << 20))
        assert answer_of(connection).startswith(b"HTTP/1.1 431 ")


def test_requests_beyond_the_open_ones_are_refused_before_their_body_is_sent(guarded: Served) -> None:
    connections = [connect(guarded) for _ in range(25)]
    for connection in connections:
        connection.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
    with connections[-1] as last:
        assert last.recv(100).startswith(b"HTTP/1.1 429 ")
    for connection in connections:
        connection.close()
    end_s = time.monotonic() + 120
    while post(guarded, CHAT).status_code != 200:
        assert time.monotonic() < end_s


def test_a_client_that_stops_reading_used_to_hold_its_request_for_ever(guarded: Served) -> None:
    # Small segments keep the server's buffer small: it is full after some steps of 32 KB.
    body = {**CHAT, "stream": True, "max_tokens": 200, "n": 16, "logprobs": True, "top_logprobs": 20}
    content = json.dumps({**body, "ignore_eos": True}).encode()
    with steady(guarded), socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        host, port = guarded.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
        end_s = time.monotonic() + 120
        while "reads_too_slowly" not in guarded.log.read_text() and time.monotonic() < end_s:
            time.sleep(0.1)
        answer = answer_of(connection)
    assert b" 200 " in answer[:20] and b"[DONE]" not in answer, answer[-500:]
    assert "reads_too_slowly" in guarded.log.read_text(), answer[-500:]
