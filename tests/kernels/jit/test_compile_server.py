"""Kernels compiled by processes beside this one, for a GPU that need not be here, and found in Triton's cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from graftlm.kernels.hopper.support import GluonModule
from graftlm.kernels.jit import compile_worker, python_process
from graftlm.kernels.jit.compile_server import CompileServer

pytest.importorskip("triton")

_SCRIPT = """
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from graftlm.kernels.jit import compile_server
from graftlm.kernels.jit.compile_worker import _NoDriver
from graftlm.kernels.hopper.tiles import shared_layout
from graftlm.kernels.hopper.prefetch_matmul import _prefetch
from graftlm.kernels.gpu.sampling.token_mask import _apply_mask

compile_server.FEWEST_CORES = 1
driver.set_active(_NoDriver(GPUTarget("cuda", 90, 32)))
_NoDriver.get_current_stream = lambda self, device: 0


def specialized(kernel, *args, **options):
    found = []

    def note(*, fn, compile, **_):
        found.append((fn.jit_function, compile["specialization_data"]))
        return True

    knobs.runtime.jit_cache_hook = note
    kernel.warmup(*args, grid=(1,), **options)
    knobs.runtime.jit_cache_hook = None
    return found[0]


def hits(kernels):
    seen = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda *, cache_hit, **_: seen.append(cache_hit)
    for function, specialization in kernels:
        function.preload(specialization)
    knobs.compilation.listener = before
    return seen


mask = [
    specialized(_apply_mask, torch.float32, torch.int32, torch.int32, 8, 8, 100, BLOCK=block)
    for block in (32, 64, 128, 256, 512)
]
tiles = [TensorDescriptor.from_tensor(torch.zeros(rows, 512, dtype=torch.bfloat16), [rows, 64], shared_layout(rows, 64))
         for rows in (16, 64)]
half = torch.bfloat16
flow = specialized(
    _prefetch, *tiles, half, half, 16, 64, 1, 1, 4,
    ROWS=16, OUTPUTS=64, K=64, BOXES=2, STAGES=4, BIAS=False, PDL=False, num_warps=4, maxnreg=104,
)
"""


def _kernel_modules(language: str) -> set[str]:
    """The modules that launch a kernel of their own, written in this language."""
    found = set[str]()
    kernels = Path(compile_worker.__file__).parents[1]
    for path in kernels.rglob("*.py"):
        source = path.read_text()
        names = re.findall(rf"@(?:{language})\.jit(?:\([^()]*\))?.*\n(?:@.*\n)*def (\w+)", source)
        if any(re.search(rf"^ +{name}\[", source, re.MULTILINE) for name in names):
            found.add(".".join(path.relative_to(kernels).with_suffix("").parts))
    return found


def test_every_module_that_launches_a_kernel_is_listed() -> None:
    assert set(compile_worker.KERNELS) == _kernel_modules("triton")
    assert set(get_args(GluonModule)) == _kernel_modules("gluon")


def _run(script: str, folder: Path) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    run = subprocess.run([sys.executable, "-c", _SCRIPT + script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split("\n")[:-1]


def test_what_it_compiles_is_found_in_the_cache_and_it_leaves_nothing_behind(tmp_path: Path) -> None:
    script = """
listener = knobs.compilation.listener = lambda **_: None
with compile_server.CompileServer() as server:
    server.compile(*mask[0])
    print(hits(mask[:1]))  # nothing was missing in the cache before: it was not compiled
    mask[1][0].preload(mask[1][1])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda kernel: server.compile(*kernel), [*mask[2:], flow]))
    print(hits([*mask[2:], flow]))
    process = server._process
print(knobs.compilation.listener is listener, process.returncode == -signal.SIGKILL, server._gone)
"""
    assert _run(script, tmp_path) == ["[False]", "[True, True, True, True]", "True True True"]


def test_nobody_waits_for_a_kernel_that_does_not_compile_or_for_a_server_that_died(tmp_path: Path) -> None:
    script = """
compile_server.LONGEST_S = 1000.0  # nothing below may wait for as long


class NotReady(threading.Event):
    asked = threading.Event()

    def wait(self, timeout=None):
        self.asked.set()
        return super().wait(timeout)


with compile_server.CompileServer() as server:
    mask[0][0].preload(mask[0][1])
    function, specialization = mask[1]
    server.compile(function, specialization.replace("_apply_mask", "_apply_no_mask"))
    print(hits(mask[1:2]))
    with ThreadPoolExecutor(2) as pool:
        server._ready = NotReady()
        waiting = pool.submit(server.compile, *mask[2])
        NotReady.asked.wait(60)
        print(waiting.done())
        os.killpg(server._process.pid, signal.SIGKILL)
        waiting.result()
    server.compile(*mask[3])
    print(server._gone, hits(mask[2:4]))
"""
    assert _run(script, tmp_path) == ["[False]", "False", "True [False, False]"]


def test_a_server_that_hangs_is_given_up_once(tmp_path: Path) -> None:
    script = """
with compile_server.CompileServer() as server:
    mask[0][0].preload(mask[0][1])
    server.compile(*mask[1])
    compile_server.LONGEST_S = 0.5
    os.killpg(server._process.pid, signal.SIGSTOP)
    server.compile(*mask[2])
    compile_server.LONGEST_S = 1000.0  # nothing below may wait for as long
    server.compile(*mask[3])
print(hits(mask[1:4]), server._process.returncode == -signal.SIGKILL)
"""
    assert _run(script, tmp_path) == ["[True, False, False] True"]


@pytest.mark.parametrize("change", [("executable", ""), ("executable", "/nowhere/python"), ("frozen", True)])
def test_without_a_python_to_run_it_compiles_nothing(
    change: tuple[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlm.kernels.jit.compile_server.FEWEST_CORES", 1)
    monkeypatch.setattr(sys, *change, raising=False)
    with CompileServer() as server:
        server.compile(None, "")
    assert server._process is None


def test_a_few_cores_are_left_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlm.kernels.jit.compile_server.FEWEST_CORES", len(os.sched_getaffinity(0)) + 1)
    with CompileServer() as server:
        assert server._process is None


_KILLED = """
import os, signal, time
from graftlm.kernels.jit.compile_worker import _end_with

server, fork = os.getpid(), os.fork()
if not fork:
    _end_with(server)
    time.sleep(60)
print(fork, flush=True)
os.kill(server, signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a parent's end exists on Linux only")
def test_a_fork_used_to_outlive_its_killed_server() -> None:
    with python_process.start(("-c", _KILLED), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        status = Path(f"/proc/{int(process.stdout.readline())}/status")
    end_s = time.monotonic() + 120
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.02)
