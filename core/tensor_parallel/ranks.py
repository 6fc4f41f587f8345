"""Ranks: the sums of a model whose layers are cut over several processes, and which of them this one is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from graftlm.core.errors import ConfigError

JOIN_S = 120.0
"""Seconds in which all ranks must have started."""

LONGEST_SUM_S = 600.0
"""Seconds after which a sum that nobody has ended fails; the watch over the followers ends it much earlier."""


@dataclass(frozen=True)
class Meeting:
    """What a rank has loaded.

    facts      that must be the same on all ranks, by name
    num_slots  that its KV pool may have; num_states likewise
    """

    facts: Mapping[str, str]
    num_slots: int
    num_states: int

    def common(self, other: Meeting, rank: int) -> Meeting:
        """Return what this rank and `rank` can both do. Raises ConfigError if a fact differs."""
        for name, fact in self.facts.items():
            if other.facts.get(name) != fact:
                raise ConfigError(
                    f"the ranks differ in their {name}: {fact} on rank 0, {other.facts.get(name)} on rank {rank}; use "
                    "cards of one kind and the same options, or tensor_parallel=1"
                )
        return replace(
            self,
            num_slots=min(self.num_slots, other.num_slots),
            num_states=min(self.num_states, other.num_states),
        )


class Progress(Protocol):
    """Where a rank notes its progress, for the watch of rank 0."""

    def summing(self, number: int) -> None:
        """Note that the rank waits for the others in its sum `number`."""
        ...

    def summed(self) -> None:
        """Note that it waits no more."""
        ...


class Ranks:
    """One of `size` processes that hold a shard of a model each, and the sums over all of them.

    While a model is loaded, `live` is False: no rank waits for another one. A sum then multiplies by the number of
    ranks, as if the others held the same part, so that each shard is a model of its own: a replacement of modules that
    leaves a sum out differs from the original and is refused.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: str, progress: Progress) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.live = False
        self.meet: Callable[[Meeting], Meeting] = lambda mine: mine
        self._store = store
        self._progress = progress
        self._num_sums = 0
        self._group: Any = None

    def agree(self, mine: Meeting) -> Meeting:
        """Meet the other ranks, which have loaded their shards too. -> what all have in common; sums are live then"""
        common = self.meet(mine)
        self._group = _gloo(self.rank, self.size, self._store)
        self.live = True
        return common

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts, equal to the bit on all of them; in place where the device allows it."""
        if not self.live:
            return part.mul_(self.size)
        self._num_sums += 1
        self._progress.summing(self._num_sums)
        try:
            return self._sum(part)
        finally:
            self._progress.summed()

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        wide = part.float() if part.dtype.itemsize < 4 else part.contiguous()
        if self.size == 2:
            self._group.allreduce([wide]).wait()
        else:  # added in the order of the ranks: a ring's order depends on the number of rows
            parts = [torch.empty_like(wide) for _ in range(self.size)]
            self._group.allgather([parts], [wide]).wait()
            wide = parts[0]
            for other in parts[1:]:
                wide.add_(other)
        return part.copy_(wide) if wide is not part else part

    def abort(self) -> None:
        """Let a sum that waits for a rank that has ended end too. From any thread."""

    def close(self) -> None:
        """Leave the group."""
        self._group = None


def _gloo(rank: int, size: int, path: str) -> Any:
    """Join the other ranks on this machine's loopback device. path: of a file that all ranks open"""
    distributed: Any = dist
    store = distributed.FileStore(path, size)
    store.set_timeout(timedelta(seconds=JOIN_S))
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=LONGEST_SUM_S)
    return distributed.ProcessGroupGloo(store, rank, size, options)


class _Current(threading.local):
    ranks: Ranks | None = None


_current = _Current()


def ranks_at_hand() -> Ranks | None:
    """The ranks for which this thread loads a model; None for a model of one process."""
    return _current.ranks


@contextmanager
def loading_for(ranks: Ranks | None) -> Iterator[None]:
    """Let models that this thread loads be the shard of a rank."""
    before, _current.ranks = _current.ranks, ranks
    try:
        yield
    finally:
        _current.ranks = before


def summing_hook(ranks: Ranks) -> Callable[..., Any]:
    """A forward hook of a module whose output is a part of a sum."""

    def summed(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return ranks.sum(output)

    return summed
