"""Callers of endpoints share one event loop; nothing that one of them does may stop it for the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import graftlm as gl
from graftlm.core.errors import EngineError
from tests.core.remote.models import continues
from tests.core.remote.server import Server

LIMIT_S = 60
"""After so long a call counts as hung."""


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_futures_callback_that_raises_used_to_end_the_loop_for_all(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(future: Any) -> None:
        raise kind("a caller's code")

    with Server(continues("a b c d")) as server, gl.Runtime("m", base_url=server.url) as rt:
        future = rt.submit(gl.Request("a b"))
        future.add_done_callback(fail)
        assert future.result(LIMIT_S).text == " c d"
        assert rt.submit(gl.Request("a b")).result(LIMIT_S).text == " c d"
    assert "a caller's code" in caplog.text


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_an_on_chunk_that_raises_ends_its_own_request(kind: type[BaseException]) -> None:
    def fail(chunk: gl.Chunk) -> None:
        raise kind("a caller's code")

    with Server(continues("a b c d")) as server, gl.Runtime("m", base_url=server.url) as rt:
        future = rt.submit(gl.Request("a b", stream=True, on_chunk=fail))
        with pytest.raises(kind, match="a caller's code"):
            future.result(LIMIT_S)
        assert rt.submit(gl.Request("a b")).result(LIMIT_S).text == " c d"


@pytest.mark.parametrize("name", ["generate", "stream", "result", "load"])
def test_a_waiting_call_in_a_callback_used_to_wait_for_itself_forever(name: str) -> None:
    met: list[BaseException] = []
    over = threading.Event()

    with Server(continues("a b c d")) as server, gl.Runtime("m", base_url=server.url) as rt:
        calls: dict[str, Any] = {
            "generate": lambda: rt.generate("a b"),
            "stream": lambda: rt.stream("a b"),
            "result": lambda: rt.submit(gl.Request("a b")).result(),
            "load": rt.load,
        }

        def wait(future: Any) -> None:
            try:
                calls[name]()
            except BaseException as error:
                met.append(error)
            over.set()

        rt.submit(gl.Request("a b")).add_done_callback(wait)
        assert over.wait(LIMIT_S)
    assert len(met) == 1 and isinstance(met[0], EngineError)
    assert "would wait for itself" in str(met[0])


def test_closing_in_a_callback_does_not_wait_for_the_loop_that_it_runs_on() -> None:
    over = threading.Event()
    with Server(continues("a b c d")) as server:
        rt = gl.Runtime("m", base_url=server.url).load()

        def close(future: Any) -> None:
            rt.close()
            over.set()

        rt.submit(gl.Request("a b")).add_done_callback(close)
        assert over.wait(LIMIT_S) and rt.closed
        with gl.Runtime("m", base_url=server.url) as other:
            assert other.submit(gl.Request("a b")).result(LIMIT_S).text == " c d"
