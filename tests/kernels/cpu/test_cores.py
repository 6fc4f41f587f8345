from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm.kernels.cpu.cores import usable_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path, monkeypatch: pytest.MonkeyPatch, num_cpus: int = 8) -> None:
    """Eight logical processors, each a core of its own, and no control group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cpus)), raising=False)
    for cpu in range(num_cpus):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu}\n")


def test_without_a_limit_every_core_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    assert usable_cores(tmp_path) == 8


def test_the_quota_of_a_container_counts_rounded_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert usable_cores(tmp_path) == 3


def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    write(tmp_path / "proc/self/cgroup", "0::/pods/one\n")
    write(tmp_path / "sys/fs/cgroup/pods/cpu.max", "200000 100000\n")
    write(tmp_path / "sys/fs/cgroup/pods/one/cpu.max", "max 100000\n")
    assert usable_cores(tmp_path) == 2


def test_control_groups_of_the_first_version_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    write(tmp_path / "proc/self/cgroup", "4:memory:/other\n2:cpu,cpuacct:/one\n")
    write(tmp_path / "sys/fs/cgroup/cpu/one/cpu.cfs_quota_us", "50000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/one/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path) == 1


def test_two_logical_processors_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch)
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    assert usable_cores(tmp_path) == 4


FIT = """
import sys, torch
import graftlm.kernels.cpu.cores as cores
torch.set_num_threads(6)
cores.usable_cores = lambda: 2
cores.fit_threads()
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(("chosen", "expected"), [({}, "2"), ({"OMP_NUM_THREADS": "6"}, "6")])
def test_torch_gets_no_more_threads_than_cores_unless_the_user_chose(chosen: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **chosen}
    done = subprocess.run([sys.executable, "-c", FIT], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == expected
