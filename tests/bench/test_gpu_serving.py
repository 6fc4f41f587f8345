"""Servers of the benchmark beside vLLM: started, found ready and ended; one that ends by itself says why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.gpu.serving import free_port, serving

HEALTHY = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"


def test_a_server_is_ready_when_it_answers_and_ends_with_the_block(tmp_path: Path) -> None:
    served = tmp_path / "health"
    served.write_text("ok")
    port, code = free_port(), f"import os; os.chdir({str(tmp_path)!r}); {HEALTHY}"
    log = tmp_path / "log"
    with serving(["-c", code, str(port)], dict(os.environ), log, f"http://127.0.0.1:{port}") as ready_s:
        assert ready_s > 0
    assert '"GET /health HTTP/1.1" 200' in log.read_text()


def test_a_server_that_ends_by_itself_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = ["-c", "raise SystemExit('no such device')"]
    with (
        pytest.raises(RuntimeError, match="not ready: no such device"),
        serving(command, dict(os.environ), tmp_path / "log", f"http://127.0.0.1:{free_port()}"),
    ):
        raise AssertionError("it never was ready")
