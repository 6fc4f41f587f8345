"""SpinControl: threads sleep beside processes that use every core, and spin when they have cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graftlm.kernels.cpu.compiled.openmp import parallel_region
from graftlm.kernels.cpu.compiled.spinning import SpinControl

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the system keeps no such times")


@contextmanager
def busy_cores() -> Iterator[None]:
    """Two processes a core that never rest."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def idle_teams() -> set[threading.Thread]:
    """Those of this process; engines of other tests may have some."""
    return {thread for thread in threading.enumerate() if thread.name == "graftlm idle team"}


class Told(SpinControl):
    """One whose thread ran and waited as the test says, in seconds."""

    ran = waited = 0.0

    def _times(self) -> tuple[int, int]:
        return int(1e9 * self.ran), int(1e9 * self.waited)

    def tell(self, ran: float, waited: float) -> None:
        self.ran += ran
        self.waited += waited
        self._next = 0.0
        self.look()


def test_threads_sleep_beside_busy_processes() -> None:
    watch, end = SpinControl(), time.monotonic() + 120
    with busy_cores():
        while not watch.sleeps and time.monotonic() < end:
            watch.look()
    assert watch.sleeps


@pytest.mark.skipif(parallel_region() is None, reason="torch has no OpenMP here")
def test_an_idle_team_lives_as_long_as_threads_sleep() -> None:
    others = idle_teams()
    watch = Told()
    watch.tell(1, 0.1)
    assert not watch.sleeps
    watch.tell(1, 1)
    assert watch.sleeps
    (team,) = idle_teams() - others
    watch.tell(1, 0.3)
    assert watch.sleeps, "between the two shares all stays as it is"
    watch.tell(1, 0.1)
    assert not watch.sleeps
    team.join(60)
    assert not team.is_alive()
    watch.tell(1, 1)
    (team,) = idle_teams() - others
    watch.close()
    assert not team.is_alive()


@pytest.mark.skipif(parallel_region() is None, reason="torch has no OpenMP here")
def test_an_idle_team_ends_with_its_owner() -> None:
    others = idle_teams()
    watch = Told()
    watch.tell(1, 1)
    (team,) = idle_teams() - others
    del watch
    team.join(60)
    assert not team.is_alive()


def test_little_time_decides_nothing() -> None:
    watch = Told()
    watch.tell(0.001, 0.02)
    assert not watch.sleeps
