"""Work that is valid and large shares the server with others, ends in time, and is counted."""

from __future__ import annotations

import json
import re
import select
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.adapters.server.hostile.conftest import CHAT, connect, post, steady
from tests.served import Served

LONG: dict[str, Any] = {**CHAT, "max_tokens": 4000, "ignore_eos": True}


def wait_until(reached: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def generated(served: Served) -> float:
    found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)", served.get("/metrics")[1], re.MULTILINE)
    assert found is not None
    return float(found.group(1))


def test_the_servers_timeout_ends_a_request(keyed: Served) -> None:
    answer = post(keyed, {**LONG, "n": 8}, authorization="Bearer mine")
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


def test_tokens_are_counted_while_they_are_generated_and_those_of_cancelled_requests_too(guarded: Served) -> None:
    wait_until(lambda: '"running":0' in guarded.get("/stats")[1].replace(" ", ""))
    before = generated(guarded)
    with httpx.stream(
        "POST", f"{guarded.url}/v1/chat/completions", json={**LONG, "stream": True}, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        for _ in range(40):
            next(lines)
        wait_until(lambda: generated(guarded) >= before + 10)
    assert generated(guarded) >= before + 10
    line = r"127\.0\.0\.1 POST /v1/chat/completions 499 \S+ ms model=sprout generated=\d+ reason=cancelled"
    wait_until(lambda: re.search(line, guarded.log.read_text()) is not None)


def test_many_sequences_of_one_request_let_others_run(guarded: Served) -> None:
    prompts = [f"The sea {i}" for i in range(400)]
    body = json.dumps({"prompt": prompts, "max_tokens": 60, "ignore_eos": True}).encode()
    with steady(guarded) as count, connect(guarded) as connection:
        before = count()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        wait_until(lambda: count() > before + 3)
        assert select.select([connection], [], [], 0)[0] == []


def test_schemas_whose_clients_have_gone_keep_nobody_waiting(guarded: Served) -> None:
    def body(number: int) -> bytes:
        names = {f"p{number}_{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 9 + 1},40}}x$"} for i in range(900)}
        schema = {"type": "object", "properties": names, "required": list(names)[::2]}
        return json.dumps({**CHAT, "guided_json": schema}).encode()

    with steady(guarded):
        for number in range(12):
            data = body(number)
            with connect(guarded) as connection:
                head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
                connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
                time.sleep(0.05)
        small = post(guarded, {**CHAT, "max_tokens": 20, "guided_json": {"const": "small"}})
    assert small.json()["choices"][0]["message"]["content"] == '"small"'
