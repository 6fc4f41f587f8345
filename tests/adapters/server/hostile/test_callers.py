"""One caller learns nothing of another, and pages of other sites reach no local server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters.server.hostile.conftest import CHAT, connect, post
from tests.served import Served, started

SECRET = "The PIN of the other caller, which nobody else may learn, is 4711. " * 4


def cached(served: Served, key: str, prompt: str, **more: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, **more}
    answer = post(served, body, "/v1/completions", authorization=f"Bearer {key}").raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_cached_tokens_reveal_no_prompt_of_another_key(keyed: Served) -> None:
    cached(keyed, "mine", SECRET)
    own = cached(keyed, "mine", SECRET)
    assert own > 40
    assert cached(keyed, "other key", SECRET) == 0
    assert cached(keyed, "other key", SECRET, cache_salt="mine:") == 0
    assert cached(keyed, "other key", SECRET) == own


def test_a_salt_keeps_requests_of_one_key_apart(keyed: Served) -> None:
    prompt = SECRET + "salted"
    cached(keyed, "mine", prompt, cache_salt="a")
    assert cached(keyed, "mine", prompt, cache_salt="b") == 0
    assert cached(keyed, "mine", prompt, cache_salt="a") > 40


def test_the_variable_is_one_key_and_log_lines_cannot_be_forged(tmp_path: Path) -> None:
    with started(tmp_path, "sprout", GRAFTLM_API_KEY="correct horse battery") as served:
        served.wait_ready()

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(f"{served.url}/v1/models", headers=headers).status_code

        assert [status(key) for key in ("horse", "correct", "battery")] == [401, 401, 401]
        assert status("correct horse battery") == 200
        forged = "/x%0a2026-01-01 00:00:00 INFO forged%1b[31m%e2%80%a8end"
        httpx.get(served.url + forged, headers={"authorization": "Bearer correct horse battery"})
        served.end(signal.SIGTERM)
        log = served.log.read_text()
    line = next(line for line in log.splitlines() if "forged" in line)
    assert r"GET /x\n2026-01-01 00:00:00 INFO forged\x1b[31m\u2028end 404" in line
    assert "\x1b" not in log


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_without_the_type_of_json_is_refused(guarded: Served, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = httpx.post(f"{guarded.url}/v1/chat/completions", content=b'{"messages": []}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "file://"])
def test_a_page_of_another_origin_is_refused(guarded: Served, origin: str) -> None:
    answer = post(guarded, CHAT, origin=origin)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_the_own_page_is_let_in(guarded: Served) -> None:
    assert post(guarded, CHAT, origin=guarded.url).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:9", 200),
        ("[::1]:9", 200),
        ("app.localhost", 200),
    ],
)
def test_a_name_that_is_not_the_servers_is_refused(guarded: Served, host: str, status: int) -> None:
    with connect(guarded) as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 %d " % status)


def test_with_a_key_every_name_and_origin_is_let_in(keyed: Served) -> None:
    headers = {"authorization": "Bearer mine", "host": "llm.example", "origin": "https://chat.example"}
    assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200
