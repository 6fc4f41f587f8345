from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.kernels.cpu.contention import CoreContention


def write(tasks: Path, waited_s: float) -> None:
    """One thread, which has waited so long."""
    (tasks / "1").mkdir(exist_ok=True)
    (tasks / "1/schedstat").write_text(f"7 {round(1e9 * waited_s)} 3\n")


def test_threads_that_wait_for_cores_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 0)
    contention = CoreContention(tmp_path)
    for waited_s in (60, 120):
        write(tmp_path, waited_s)
        for _ in range(6):
            contention.add(1.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "waited 60 s" in caplog.text


def test_threads_that_hardly_wait_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 0)
    contention = CoreContention(tmp_path)
    write(tmp_path, 0.1)
    for _ in range(30):
        contention.add(1.0)
    assert not caplog.records


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process can be tied to one core here")
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waiting")
def test_two_processes_on_one_core_are_found_out() -> None:
    code = """
import os, time
from graftlm.kernels.cpu.contention import CoreContention
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
contention = CoreContention()
before_s, end = contention._waiting_s(), time.monotonic() + 1.0
if os.fork() == 0:
    while time.monotonic() < end: pass
    os._exit(0)
while time.monotonic() < end: pass
print(contention._waiting_s() - before_s)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert float(done.stdout) > 0.05
