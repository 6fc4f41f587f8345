"""The program of `CompileServer`: it compiles Triton kernels for another process.

stdin   a job a line, as JSON: number, module, name of a kernel in it, specialization (argument of
        `JITFunction.preload`), target (arguments of `GPUTarget`). The program ends at the end of stdin.
stdout  "ready" once everything is imported, then the number of each finished job, compiled or not.

Each job runs in a fork, which leaves its result in Triton's cache on disk. No GPU is touched.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any, get_args

KERNELS = (
    "codes.fp8_rows",
    "codes.widen",
    "gpu.attention.block_table",
    "gpu.attention.decode",
    "gpu.attention.extend",
    "gpu.attention.latent",
    "gpu.attention.one_order",
    "gpu.attention.qkv_rope_store",
    "gpu.attention.shared_prefix",
    "gpu.block_rows",
    "gpu.elementwise",
    "gpu.linear.batch_invariant_matmul",
    "gpu.linear.gemv",
    "gpu.linear.skinny_matmul",
    "gpu.mixture.expert_blocks",
    "gpu.mixture.expert_router",
    "gpu.mixture.grouped_matmul",
    "gpu.norm",
    "gpu.rank_sum",
    "gpu.recurrent_decode",
    "gpu.recurrent_prefill",
    "gpu.sampling.argmax",
    "gpu.sampling.nucleus",
    "gpu.sampling.token_mask",
    "gpu.step_inputs",
    "hopper.gather_kv",
)
"""The modules of graftlm.kernels that launch kernels in Triton; hopper/support.py lists the modules in Gluon."""


class _NoTorch(ModuleType):
    """A stand-in for torch, the slowest import: modules of kernels name torch, kernels do not."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NoTorch(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        return _NoTorch(self.__name__)

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return (object,)


class _NoDriver:
    """The part of a driver that Triton's compiler uses: the target GPU."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def main() -> None:
    replies = os.dup(1)
    os.dup2(2, 1)  # output of libraries is not a reply
    _import_all()
    os.write(replies, b"ready\n")
    server = os.getpid()
    for line in sys.stdin:
        if os.fork() == 0:
            _end_with(server)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            job = json.loads(line)
            with suppress(BaseException):
                _compile(job)
            os.write(replies, f"{job['number']}\n".encode())
            os._exit(0)


def _end_with(server: int) -> None:
    """End this fork once the server has ended, even if it was killed: its own parent may have been killed before."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def _import_all() -> None:
    """Import modules and compute Triton's key once, before forking, instead of in every fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the forks
    sys.modules["torch"] = _NoTorch("torch")
    from graftlm.kernels.hopper.support import GluonModule

    for name in (*KERNELS, *get_args(GluonModule)):
        with suppress(Exception):  # this Triton lacks a feature that the module uses
            importlib.import_module(f"graftlm.kernels.{name}")
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


def _compile(job: dict[str, Any]) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget(*job["target"])
    driver.set_active(_NoDriver(target))
    function = getattr(importlib.import_module(job["module"]), job["name"])
    kernel = function.preload(job["specialization"])
    if target.backend == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)  # older Tritons compile a launcher for each signature, in C


if __name__ == "__main__":
    main()
