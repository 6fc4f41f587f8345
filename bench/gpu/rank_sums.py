"""python -m bench.gpu.rank_sums [--ranks N]: sums over GPUs inside a CUDA graph, in us: own kernel, NCCL, torch's.

Each rank is a process of its own. Before a time is taken, the own kernel's results are compared: to the bit between
ranks, and with the sum of the parts. Tensors are [rows, 4096] in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftlm.kernels.jit import python_process
from graftlm.kernels.norm import Norm

ROWS = (1, 4, 16, 64, 256, 1024, 8192)
WIDTH = 4096
REPEATS, REPLAYS = 64, 20
STALLED_S = 6.0
"""Seconds after which all sums that wait are ended."""


def graphed_us(run: Callable[[], Any]) -> float:
    """Return the microseconds of one call of `run` in a graph of many."""
    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            run()
    graph.replay()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(1e3 * start.elapsed_time(end) / (REPEATS * REPLAYS))


def measure(rank: int, size: int, store: str) -> None:
    """Run one rank; rank 0 prints."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    from graftlm.core.tensor_parallel.sums import DeviceSums

    device = torch.device("cuda", rank)
    made: Any = DeviceSums(dist.FileStore(store, size), rank, size, device)  # type: ignore[attr-defined]
    say: Callable[..., None] = print if rank == 0 else lambda *_, **options: None
    say("own kernel:", made.reason or "in use", flush=True)
    if made._own is not None:
        check(made, rank, size, device)
        say("own kernel: random sums are equal on all ranks, and right", flush=True)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    for rows in ROWS:
        x = torch.randn(rows, WIDTH, device=device).to(torch.bfloat16)
        times: dict[str, str] = {}
        ways: dict[str, Callable[[], Any]] = {"nccl": partial(dist.all_reduce, x)}
        if made._own is not None and made._own.takes(x.shape, x.dtype):
            parts = x[None]
            ways["own"] = partial(made._own, parts, torch.bfloat16)
            four = torch.randn(4, rows, WIDTH, device=device)
            residual, norm = torch.randn_like(x), Norm(torch.ones(WIDTH, device=device, dtype=x.dtype), 1e-5)
            ways["own with a norm"] = partial(made.add_norm, parts, residual, norm)
            if rows <= 64:
                ways["the same of 4 float32 parts"] = partial(made.add_norm, four, residual, norm)
                ways["own of 4 float32 parts"] = partial(made._own, four, torch.bfloat16)
        try:
            memory: Any = symmetric
            held = memory.empty(x.numel(), dtype=x.dtype, device=device)
            memory.rendezvous(held, group)
            ways["one_shot"] = partial(torch.ops.symm_mem.one_shot_all_reduce, held, "sum", group)
            ways["two_shot"] = partial(torch.ops.symm_mem.two_shot_all_reduce_, held, "sum", group)
        except Exception as error:
            say("symmetric memory:", error)
        for name, run in ways.items():
            late = threading.Timer(STALLED_S, made._end_waits)
            late.start()
            try:
                times[name] = f"{graphed_us(run):.1f}"
            except Exception as error:
                times[name] = f"{type(error).__name__} {str(error)[:80]}"
            late.cancel()
            if int(made._abort[0]):
                times[name] = f"stalled for {STALLED_S:.0f} s"
            dist.barrier()
            torch.cuda.synchronize()
            made._abort.zero_()
        say(rows, times, flush=True)
    os._exit(0)


def check(sums: Any, rank: int, size: int, device: torch.device) -> None:
    """Compare random sums of random sizes with those of NCCL in float32, and between the ranks."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(3)
    for number in range(300):
        rows = int(torch.randint(1, 70, (1,), generator=generator))
        dtype = (torch.bfloat16, torch.float32)[number % 2]
        torch.manual_seed(1000 * number + rank)
        parts = torch.randn(1 + number % 3, rows, WIDTH, device=device)
        found = sums(parts, dtype)
        own = parts.sum(0).to(dtype).float()
        dist.all_reduce(own)
        error = float((found.float() - own).norm() / own.norm())
        bits = found.view(torch.int32 if dtype is torch.float32 else torch.int16).long().sum().reshape(1)
        least, most = bits.clone(), bits.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if int(least) != int(most) or error > (1e-6 if dtype is torch.float32 else 1e-2):
            raise RuntimeError(f"sum {number} of {rows} rows: error {error}, bits {int(most) - int(least)} apart")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.rank_sums", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    given = parser.parse_args()
    if given.rank is not None:
        python_process.end_with_starter()
        try:
            measure(given.rank, given.ranks, given.store)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = ["-m", "bench.gpu.rank_sums", "--ranks", str(given.ranks), "--store", store]
        started = [
            python_process.start([*command, "--rank", str(rank)], stdin=subprocess.PIPE) for rank in range(given.ranks)
        ]
        return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
