"""Forks: how they end."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

BEGIN = """
import os, signal, socket, sys, threading
from graftlm.core.grammar.drafting.forks import Forks, follow
forks = Forks()
def run():
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
"""


@contextmanager
def _script(code: str, *descriptors: int) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command, pipe = [sys.executable, "-P", "-c", BEGIN + code], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=environment, pass_fds=descriptors) as script:
        try:
            yield script
        finally:
            script.kill()


def test_one_that_is_ended_twice_is_killed_once() -> None:
    code = """
forks.start(3, run)
forks.end(3)
forks.end(3)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("none left")
"""
    with _script(code) as script:
        assert script.communicate(timeout=60)[0].splitlines()[-1:] == ["none left"]


def test_a_fork_ends_whose_parent_had_ended_before_it_could_ask_to_end_with_it() -> None:
    code = """
forks._end_with(os.getppid())
print("the parent lives", flush=True)
forks._end_with(os.getpid())
print("the parent has ended")
"""
    with _script(code) as script:
        assert script.communicate(timeout=60)[0].splitlines() == ["the parent lives"]
        assert script.returncode == 0


@pytest.mark.parametrize("told", [True, False])
def test_forks_end_with_the_owner_whether_its_socket_says_so_or_its_process(told: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as owner:
        process = os.pidfd_open(owner.pid)
        code = f"""
for place in range(2):
    forks.start(place, run)
follow(socket.socket(fileno={theirs.fileno()}), {process}, forks)
"""
        with _script(code, theirs.fileno(), process) as script:
            theirs.close()
            os.close(process)
            assert script.stdout is not None
            living = [os.pidfd_open(int(script.stdout.readline())) for _ in range(2)]
            ours.send(b"1")
            assert len(select.select(living, [], [], 60)[0]) == 1
            assert script.poll() is None
            if told:
                ours.close()
            else:
                owner.kill()
            assert script.wait(60) == 0
            for fork in living:
                assert select.select([fork], [], [], 60)[0] == [fork]
                os.close(fork)
        owner.kill()
