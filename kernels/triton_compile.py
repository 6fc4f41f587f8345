"""Kernels compiled side by side, before the call that needs them would compile one after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from graftlm.kernels.gpu_support import triton_problem

MAX_THREADS = 16


def compile_together(run: Callable[[], object], device: torch.device) -> int:
    """Compile what `run` launches on `device`, in threads. -> how many kernels

    `run` is called once, with every launch left out whose kernel is not loaded: what it computes is void, and what it
    raises is left for the call that counts to raise. So is a kernel that does not compile. Does nothing where Triton
    does not run.
    """
    if triton_problem(device) is not None:
        return 0
    from triton import knobs

    wanted = _Wanted()
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = wanted
    try:
        with suppress(Exception):
            run()
    finally:
        knobs.runtime.jit_cache_hook = before
    if wanted.kernels:
        index = torch.cuda.current_device() if device.index is None else device.index
        threads = min(len(wanted.kernels), MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(
            threads, "graftlm compile", initializer=torch.cuda.set_device, initargs=(index,)
        ) as pool:
            list(pool.map(_compile, wanted.kernels.values()))
    return len(wanted.kernels)


class _Wanted:
    """What Triton calls before it compiles a kernel: for its own thread it notes the kernel down and says no."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, Any], tuple[Any, str]] = {}
        self._thread = threading.get_ident()

    def __call__(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if threading.get_ident() != self._thread:
            return False
        self.kernels.setdefault((fn.name, key), (fn.jit_function, compile["specialization_data"]))
        return True


def _compile(kernel: tuple[Any, str]) -> None:
    function, specialization = kernel
    with suppress(Exception):
        assert function.preload(specialization).run  # what launches it is compiled when it is asked for
