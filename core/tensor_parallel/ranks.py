"""Ranks: the sums of a model whose layers are cut over several processes, and which of them this one is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.core.tensor_parallel.sums import Sums
    from graftlm.kernels.norm import Norm


@dataclass(frozen=True)
class Meeting:
    """The model that a rank has loaded, and the pools that fit beside it.

    facts       properties that must be equal on all ranks, by name
    num_slots   largest KV pool, in tokens
    num_states  largest pool of states
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
        self._sums: Sums | None = None

    def agree(self, mine: Meeting) -> Meeting:
        """Meet the other ranks, which have loaded their shards too. -> what all have in common; sums are live then"""
        from graftlm.core.tensor_parallel.sums import sums_on

        common = self.meet(mine)
        self._sums = sums_on(self.device, self.rank, self.size, self._store)
        self.live = True
        return common

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts, equal to the bit on all of them; the part may be overwritten."""
        return self.sum_parts(part[None], part.dtype) if self.live else part.mul_(self.size)

    def sum_parts(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum parts [num_parts, ...] of this rank, and those of all ranks. -> [...] in `dtype`"""
        if not self.live or self._sums is None:
            return parts.sum(0).mul_(self.size).to(dtype)
        self._num_sums += 1
        self._progress.summing(self._num_sums)
        try:
            return self._sums(parts, dtype)
        finally:
            self._progress.summed()

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        """Add all ranks' parts [num_parts, num_rows, n] to the residual, in place; None if one kernel cannot.

        -> the residual after `norm`; the residual itself without one
        """
        if not self.live or self._sums is None:
            return None
        return self._sums.add_norm(parts, residual, norm)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, in their order, on rank 0. part: [num_rows, n] of this rank

        On other ranks the result has no meaning. While a model is loaded it is the part.
        """
        if not self.live or self._sums is None:
            return part
        self._num_sums += 1
        self._progress.summing(self._num_sums)
        try:
            return self._sums.gather(part)
        finally:
            self._progress.summed()

    def from_first(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return rank 0's numbers, of which the other ranks know the shape. int64, up to 2**24"""
        if not self.live:
            return numbers
        return self.sum(numbers.clone() if self.rank == 0 else torch.zeros_like(numbers))

    def abort(self) -> None:
        """Let sums that wait for a rank that has ended end too, with any result. From any thread."""
        if self._sums is not None:
            self._sums.abort()

    def close(self) -> None:
        """Leave the group."""
        if self._sums is not None:
            self._sums.close()
        self._sums = None


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


HEAD_PARTS = "graftlm_head_parts"
"""The attribute of a model whose head computes the logits of a part of the vocabulary: the number of parts."""

REDUCE = "graftlm_reduce"
"""The attribute of a module whose output is a part of a sum: a SumParts for code that does not call the module."""


class RankReduce:
    """The sum of a module for code that does not call it (SumParts)."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._ranks.sum_parts(parts, dtype)

    def add_norm(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None) -> torch.Tensor | None:
        return self._ranks.add_norm(parts, residual, norm)

    def __deepcopy__(self, memo: object) -> RankReduce:
        return self  # a copy of a module is of the same rank


def move_sum(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Let a module that takes the place of another one sum its outputs too."""
    new._forward_hooks.update(old._forward_hooks)
    if hasattr(old, REDUCE):
        setattr(new, REDUCE, getattr(old, REDUCE))


def add_sum(module: torch.nn.Module, ranks: Ranks) -> None:
    """Sum the outputs of a module, which are parts of sums."""

    def summed(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return ranks.sum(output)

    module.register_forward_hook(summed)
    setattr(module, REDUCE, RankReduce(ranks))
