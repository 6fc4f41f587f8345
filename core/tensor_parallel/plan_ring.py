"""PlanRing: memory that rank 0 and its followers share: steps on their way, and how far each rank has come.

It has no name in the file system, so nothing stays of it, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from graftlm.kernels.wire_plan import WirePlan

SLOTS = 8
CHUNK = 1 << 20
"""Bytes of a slot. A longer plan takes several."""

_HEADER = 4096
_WORDS = 8
"""Words of 8 bytes of each rank: one cache line."""

_WRITTEN, _READ, _BEATS, _SUMS, _WAITS, _DONE = range(6)
"""Indices of the words of a rank. They count slots written (rank 0), slots read, beats, sums begun and steps launched;
`_WAITS` is 1 while the rank waits in a sum."""

_SHORT_S, _LONG_S = 5e-5, 2e-3
"""Pauses of a reader between two looks: while steps come, and after a second without."""

_OTHERS = ("embedded", "until_windowed")
"""Fields that are no arrays: of steps with pictures only."""
_NAMES = [each.name for each in fields(WirePlan) if each.name not in _OTHERS]
_INT32 = {"token_sources"}
_SHAPES = {"extents": (-1, 2), "state_copies": (-1, 2), "grid": (3, -1)}


class PlanRing:
    """Plans of rank 0 in shared memory, which each follower reads in order.

    fd    of the memory, as `new_memory` made it
    spin  seconds in which a reader looks again and again before it pauses
    """

    def __init__(self, fd: int, rank: int, size: int, *, spin: float = 0.0) -> None:
        self._memory = mmap.mmap(fd, memory_bytes())
        words = np.frombuffer(self._memory, np.int64, _HEADER // 8)
        self._words = words[: _WORDS * size].reshape(size, _WORDS)
        self._own = self._words[rank]
        self._size = size
        self._spin = spin
        self._slots = [_HEADER + CHUNK * slot for slot in range(SLOTS)]
        self._fence = threading.Lock()

    def write(self, plan: WirePlan, check: Callable[[], object]) -> None:
        """Send a step to all followers; wait while they are `SLOTS` slots behind.

        check  called while waiting; what it raises ends the wait
        """
        record = pack(plan)
        for first in range(0, len(record), CHUNK - 16):
            part = record[first : first + CHUNK - 16]
            written = int(self._own[_WRITTEN])
            while written - self._read_by_all() >= SLOTS:
                check()
                time.sleep(_SHORT_S)
            start = self._slots[written % SLOTS]
            head = np.array([len(part), first + len(part) < len(record)], np.int64)
            self._memory[start : start + 16] = head.tobytes()
            self._memory[start + 16 : start + 16 + len(part)] = part
            self._order()
            self._own[_WRITTEN] = written + 1

    def read(self) -> WirePlan:
        """Wait for the next step, for as long as that takes."""
        parts = []
        more = True
        while more:
            number = int(self._own[_READ])
            self._await(number)
            self._order()
            start = self._slots[number % SLOTS]
            length, more = np.frombuffer(self._memory, np.int64, 2, start).tolist()
            parts.append(self._memory[start + 16 : start + 16 + length])
            self._order()
            self._own[_READ] = number + 1
        return unpack(bytearray().join(parts))

    def _await(self, number: int) -> None:
        began = time.perf_counter()
        leader = self._words[0]
        while leader[_WRITTEN] <= number:
            waited = time.perf_counter() - began
            if waited >= self._spin:
                time.sleep(_SHORT_S if waited < 1.0 else _LONG_S)

    def _read_by_all(self) -> int:
        return int(self._words[1 : self._size, _READ].min())

    def _order(self) -> None:
        """Let no store or load pass from one side of this call to the other, on processors that exchange them."""
        with self._fence:
            pass
        with self._fence:
            pass

    # -- progress --------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Note that this process runs."""
        self._own[_BEATS] += 1

    def summing(self, number: int) -> None:
        self._own[_SUMS] = number
        self._own[_WAITS] = 1

    def summed(self) -> None:
        self._own[_WAITS] = 0

    def done(self) -> None:
        """Note that a step was launched, or computed where nothing is launched."""
        self._own[_DONE] += 1

    def owed_by(self, rank: int) -> int | None:
        """The steps that `rank` has launched, if they are fewer than this rank's."""
        theirs = int(self._words[rank, _DONE])
        return theirs if theirs < self._own[_DONE] else None

    def beats(self, rank: int) -> int:
        return int(self._words[rank, _BEATS])

    def awaits(self, rank: int) -> int | None:
        """The number of the sum in which this process waits for `rank`; None if it does not."""
        number = int(self._own[_SUMS])
        return number if self._own[_WAITS] and self._words[rank, _SUMS] < number else None


def memory_bytes() -> int:
    """Bytes of the memory of a ring."""
    return _HEADER + SLOTS * CHUNK


def new_memory(name: str, num_bytes: int) -> int:
    """Return the file descriptor of new memory, which ends with the processes that have it."""
    fd = os.memfd_create(name)
    os.ftruncate(fd, num_bytes)
    return fd


def pack(plan: WirePlan) -> bytes:
    """Return a plan as bytes: the length of each array, -1 for None, then all arrays, then the other fields."""
    arrays = [getattr(plan, name) for name in _NAMES]
    others = [getattr(plan, name) for name in _OTHERS]
    lengths = np.array([-1 if array is None else array.size for array in arrays], np.int64)
    rest = pickle.dumps(others) if any(others) else b""
    written = [array.tobytes() for array in arrays if array is not None]
    padded = [part + bytes(-len(part) % 8) for part in written]  # each array begins at a multiple of its numbers' size
    return b"".join([lengths.tobytes(), *padded, rest])


def unpack(record: bytes | bytearray) -> WirePlan:
    """Return the plan of `pack`."""
    lengths = np.frombuffer(record, np.int64, len(_NAMES)).tolist()
    offset = 8 * len(_NAMES)
    found: dict[str, Any] = {}
    for name, length in zip(_NAMES, lengths, strict=True):
        if length < 0:
            found[name] = None
            continue
        array = np.frombuffer(record, np.int32 if name in _INT32 else np.int64, length, offset)
        found[name] = array.reshape(_SHAPES.get(name, (length,)))
        offset += array.nbytes + -array.nbytes % 8
    if offset < len(record):
        found |= zip(_OTHERS, pickle.loads(record[offset:]), strict=True)
    return WirePlan(**found)
