"""A server of another package ends with the process that started it, however that ends."""

from __future__ import annotations

import subprocess
import sys

import psutil

CHILD = (
    "import os; from graftlm.ab.classes.resettable_server import end_with; print('on', flush=True); end_with({parent})"
)
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1].format(parent=os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_server_whose_parent_is_killed_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
