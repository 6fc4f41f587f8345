"""Sums over ranks by device: gloo on a CPU; on GPUs own kernels over symmetric memory, and NCCL for what is larger."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as _distributed

from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.norm import Norm

JOIN_S = 120.0
"""Seconds in which all ranks must have started."""

LONGEST_SUM_S = 600.0
"""Seconds after which a sum that nobody has ended fails; the watch over the followers ends it much earlier."""

SLAB_BYTES = 64 << 20
"""Largest tensor that the own kernel sums: 8,192 rows of 4,096 numbers of two bytes. NCCL sums the others."""

TEST_WIDTH = 4096
"""Numbers of a row of that test."""

TEST_S = 20.0
"""Seconds after which a test of the own kernel is given up."""

_of_lost_devices: list[Any] = []
"""Memory of GPUs that fail every call; it stays until the process ends."""

log = logging.getLogger("graftlm.engine")
_dist: Any = _distributed  # its annotations lack names that exist


class Sums(Protocol):
    """Adds parts over all ranks; every rank calls it for the same shapes in the same order."""

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum parts [num_parts, ...] of this rank, and those of all ranks. -> [...] in `dtype`, the same everywhere"""
        ...

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        """Add the sum to the residual and norm it in one kernel; None, with nothing done, where there is none."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Put the columns of all ranks beside each other, for rank 0. part [num_rows, n] -> [num_rows, size * n]"""
        ...

    def abort(self) -> None:
        """Let a sum that waits end, with any result. From any thread."""
        ...

    def close(self) -> None: ...


def sums_on(device: torch.device, rank: int, size: int, store: str) -> Sums:
    """Join the other ranks. store: path of an empty file that all ranks open"""
    held = _dist.FileStore(store, size)
    held.set_timeout(timedelta(seconds=JOIN_S))
    return GlooSums(held, rank, size) if device.type == "cpu" else DeviceSums(held, rank, size, device)


class GlooSums:
    """Sums on CPUs over this machine's loopback device."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=LONGEST_SUM_S)
        self._group = _dist.ProcessGroupGloo(store, rank, size, options)
        self._size = size

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        part = parts[0] if len(parts) == 1 else parts.sum(0)
        wide = part.float() if part.is_floating_point() else part
        wide = wide.contiguous()
        if self._size == 2:
            self._group.allreduce([wide]).wait()
            return wide.to(dtype)
        # added in the order of the ranks: a ring's order depends on the number of rows
        all_parts = [torch.empty_like(wide) for _ in range(self._size)]
        self._group.allgather([all_parts], [wide]).wait()
        total = all_parts[0]
        for other in all_parts[1:]:
            total.add_(other)
        return total.to(dtype)

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        return None

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._size)]
        self._group.allgather([[one.view(torch.uint8) for one in parts]], [part.view(torch.uint8)]).wait()
        return torch.cat(parts, -1)

    def abort(self) -> None:
        pass  # the connections of a process that has ended are closed

    def close(self) -> None:
        self._group = None


class DeviceSums:
    """Sums on GPUs of one host: one kernel over symmetric memory for what fits, else NCCL."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        for name, value in (
            ("NCCL_NVLS_ENABLE", "0"),
            ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),  # it would end this process
            ("TORCH_NCCL_ENABLE_MONITORING", "0"),
        ):
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
        limit = timedelta(seconds=LONGEST_SUM_S)
        _dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=device)
        self._size, self._device = size, device
        self._abort = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._own: Any = None
        self._held: Any = None  # the memory that other ranks read
        self.reason = triton_problem(device)
        own = self._tested(rank) if self.reason is None else None
        norms = own is not None and self._passes(own, rank)
        works = torch.tensor([own is not None, norms], dtype=torch.int32, device=device)
        _dist.all_reduce(works, _dist.ReduceOp.MIN)
        all_sum, all_norm = works.tolist()
        self._norms = bool(all_norm)
        if all_sum:
            self._own = own
            if not all_norm:
                log.warning("norms follow sums over GPUs as kernels of their own: %s", self.reason or "on another rank")
        else:
            log.warning("sums over GPUs go through NCCL, more slowly: %s", self.reason or "on another rank they do")

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._own is not None and self._own.takes(parts.shape[1:], dtype):
            total: torch.Tensor = self._own(parts, dtype)
            return total
        part = (parts[0] if len(parts) == 1 else parts.sum(0)).to(dtype).contiguous()
        _dist.all_reduce(part)
        return part

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        if self._own is None or not self._norms or not self._own.norms(parts):
            return None
        normed: torch.Tensor = self._own.add_norm(parts, residual, norm)
        return normed

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        if self._own is not None and self._own.gathers(part):
            found: torch.Tensor = self._own.gather(part)
            return found
        parts = torch.empty(self._size, *part.shape, dtype=part.dtype, device=part.device)
        _dist.all_gather_into_tensor(parts, part)
        return parts.transpose(0, 1).reshape(len(part), -1)

    def _passes(self, own: Any, rank: int) -> bool:
        """Whether the kernel that also norms does as it must."""
        with self._timed():
            try:
                self._test_norm(own, rank)
            except Exception as error:
                self.reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        return self.reason is None

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Abort a test that takes too long, which then has a reason to fail."""
        late = threading.Timer(TEST_S, self._end_waits)
        late.start()
        try:
            yield
        finally:
            late.cancel()
            if int(self._abort[0]):
                self.reason = "a test of the kernel took too long"
                self._abort.zero_()

    def _tested(self, rank: int) -> Any:
        """Return the own kernel, if it adds as it must."""
        with self._timed():
            own = self._added(rank)
        return own if self.reason is None else None

    def _added(self, rank: int) -> Any:
        try:
            own = self._connected(rank)
            for dtype, num in ((torch.bfloat16, 4096), (torch.float32, 1_777_777), (torch.int64, 5)):
                for number in range(5):
                    base = (torch.arange(num, device=self._device) * 7 + number) % 101
                    found = own((base * (rank + 1)).to(dtype)[None], dtype)
                    expected = (base * sum(range(1, self._size + 1))).to(dtype)
                    if not bool((found == expected).all()):
                        raise RuntimeError("the kernel's sum is wrong")
                    rows = base[: num // 3 * 3].to(dtype).view(3, -1)
                    found = own.gather(rows * (rank + 1))
                    expected = torch.cat([rows * (each + 1) for each in range(self._size)], 1)
                    if rank == 0 and not bool((found == expected).all()):
                        raise RuntimeError("the kernel's gathered columns are wrong")
            return own
        except Exception as error:
            self.reason = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            return None

    def _test_norm(self, own: Any, rank: int) -> None:
        """Compare the kernel that also norms with its parts. Raises RuntimeError if they differ."""
        generator = torch.Generator(self._device).manual_seed(5)
        weight = torch.rand(TEST_WIDTH, generator=generator, device=self._device, dtype=torch.float32).bfloat16()
        norm = Norm(weight, 1e-5)
        for dtype, rows in ((torch.float32, 3), (torch.bfloat16, 70), (torch.bfloat16, 600), (torch.float32, 3)):
            shape = (self._size, 2, rows, TEST_WIDTH)
            parts = torch.randn(shape, generator=generator, device=self._device, dtype=torch.float32).to(dtype)
            residual = torch.randn(
                rows, TEST_WIDTH, generator=generator, device=self._device, dtype=torch.float32
            ).bfloat16()
            expected = (residual.float() + parts.float().sum((0, 1))).bfloat16()
            normed = own.add_norm(parts[rank], residual, norm)
            for found, wanted in ((residual, expected), (normed, norm(expected))):
                if not float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 1e-2:
                    raise RuntimeError("the kernel's sum before a norm is wrong")
        own.forget_width()

    def _connected(self, rank: int) -> Any:
        import torch.distributed._symmetric_memory as symmetric

        from graftlm.kernels.gpu.rank_sum import RankSum

        memory: Any = symmetric
        words = RankSum.num_bytes(SLAB_BYTES, self._size) // 4
        buffer = memory.empty(words, dtype=torch.int32, device=self._device)
        RankSum.clear(buffer, self._size)
        torch.cuda.synchronize(self._device)
        handle = memory.rendezvous(buffer, _dist.group.WORLD.group_name)
        self._held = buffer, handle
        bases = [int(base) for base in handle.buffer_ptrs]
        torch.cuda.synchronize(self._device)
        _dist.barrier()
        return RankSum(rank, bases, self._abort.data_ptr(), SLAB_BYTES, self._device)

    def _end_waits(self) -> None:
        """Set the word at which kernels that wait look; no call of CUDA, so any thread may."""
        self._abort.numpy()[0] = 1

    def abort(self) -> None:
        self._end_waits()
        if self._own is None:
            with suppress(Exception):
                _dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        self._end_waits()  # kernels that wait for a rank that has ended still read the memory
        try:
            torch.cuda.synchronize(self._device)
        except Exception:
            _of_lost_devices.append(self._held)  # to free it would end the process before the cause is told
        self._own = self._held = None
        with suppress(Exception):
            _dist.distributed_c10d._abort_process_group()
