"""A server of small limits without a key, one with two keys, and a steady client that must not notice the attacks."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.served import Served, started

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
MORE_MB = 200
"""Megabytes by which an attack may grow the server."""


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Without a key; heads have two seconds, bodies and readers three, requests a hundred."""
    limits = ("header_s=2", "body_s=3", "write_s=3", "connections_per_client=64", "held_body_bytes=40000000")
    given = [part for limit in limits for part in ("--limit", limit)]
    given += [
        "--max-open-requests",
        "24",
        "--request-timeout",
        "100",
        "--option",
        "dtype=float32",
        "--option",
        "cache.max_tokens=8192",
    ]
    with started(tmp_path_factory.mktemp("guarded"), "sprout", *given) as served:
        served.wait_ready()
        httpx.post(f"{served.url}/v1/chat/completions", json=CHAT, timeout=60).raise_for_status()
        yield served


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With the keys `mine` and `other key`; requests have six seconds."""
    given = ["--api-key", "mine", "--api-key", "other key", "--request-timeout", "6"]
    with started(tmp_path_factory.mktemp("keyed"), "sprout", "--option", "dtype=float32", *given) as served:
        served.wait_ready()
        yield served


def memory_mb(served: Served, name: str = "VmRSS") -> float:
    """Resident memory of the server; `VmHWM` is its peak."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) / 1024


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def post(served: Served, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", **headers}
    return httpx.post(served.url + path, content=content, headers=given, timeout=120)


def answer_of(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@contextmanager
def steady(served: Served, **headers: str) -> Iterator[Callable[[], int]]:
    """Run a client that asks again and again, and check at the end that each of its requests was answered.

    The value returns the number of answers so far.
    """
    statuses: list[Any] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not done.is_set() or len(statuses) < 2:
                try:
                    answer = client.post(f"{served.url}/v1/chat/completions", json=CHAT, headers=headers)
                    statuses.append(answer.status_code)
                except httpx.HTTPError as error:
                    statuses.append(error)
                done.wait(0.02)

    before_mb = memory_mb(served)
    thread = threading.Thread(target=ask)
    thread.start()
    while not statuses:
        time.sleep(0.01)
    try:
        yield lambda: len(statuses)
    finally:
        done.set()
        thread.join()
    assert len(statuses) > 1
    assert set(statuses) == {200}
    assert memory_mb(served) - before_mb < MORE_MB
