"""Threads that compute masks, also in a fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.core.grammar.masks import workers


def test_work_is_done_on_another_thread() -> None:
    assert workers.submit(divmod, 7, 2).result(30) == (3, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_has_threads_of_its_own() -> None:
    code = """
import os
from graftlm.core.grammar.masks import workers
workers.submit(divmod, 7, 2).result()
if os.fork() == 0:
    os._exit(workers.submit(divmod, 7, 2).result(30) != (3, 1))
print(os.wait()[1])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout.split() == ["0"], done.stderr
