"""Programs that compile for a GPU that is not there: each in a fork of one process that has imported Triton once.

The process of the tests has Triton's interpreter, and chose it for good when it imported Triton.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys

import pytest

_SERVER = """
import json, os, sys, tempfile, traceback
import torch, triton
import triton.backends.nvidia.compiler

for line in sys.stdin:
    program, arguments = json.loads(line)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv = ["-c", *arguments]
                exec(program, {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0), err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # the tree may not be installed
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # closes its standard input, by which it ends, and waits for that
    return server


def run_compiler(program: str, *arguments: object) -> list[str]:
    """Run `program`, Python whose sys.argv[1:] are `arguments`. -> the words that it wrote to standard output"""
    pytest.importorskip("triton")
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([program, list(map(str, arguments))]), file=server.stdin, flush=True)
    status, out, err = json.loads(server.stdout.readline())
    assert status == 0, err[-2000:]
    return str(out).split()
