"""The cost of a step on a GPU at steady state: time, and clock, power and energy as NVIDIA's library reports them.

Nothing of the card is set. Without a GPU there are times only.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch

INTERVAL_S = 0.02
SETTLE_S, READ_S = 1.2, 1.0
"""Seconds until clock and power are steady, and seconds of reading them."""

WARM_RUNS, PIECE_MS = 3, 40
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; the ordinary reading is a mean over about a second


class Reading(NamedTuple):
    """One reading of the card.

    at_s    of time.perf_counter
    mhz     clock of the multiprocessors
    joules  since the driver was loaded; None from a card that does not count them
    """

    at_s: float
    mhz: float
    watts: float
    joules: float | None


def nvml_reader() -> Callable[[], Reading]:
    """Return a reader of torch's current card; raise without a card or the package nvidia-ml-py."""
    nvml: Any = importlib.import_module("pynvml")
    handle: Any = torch.cuda._get_pynvml_handler()  # which card it is depends on CUDA_VISIBLE_DEVICES

    def watts() -> float:
        told = nvml.nvmlDeviceGetFieldValues(handle, [POWER_INSTANT])[0]
        milliwatts = told.value.uiVal if told.nvmlReturn == 0 else nvml.nvmlDeviceGetPowerUsage(handle)
        return float(milliwatts) / 1e3

    def joules() -> float | None:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError:
            return None

    def read() -> Reading:
        mhz = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return Reading(time.perf_counter(), mhz, watts(), joules())

    return read


class Card(threading.Thread):
    """Reads the card every `INTERVAL_S` seconds from `with` to its end.

    problem  why it cannot be read, or not any more; nothing is raised
    """

    def __init__(self, reader: Callable[[], Callable[[], Reading]] = nvml_reader) -> None:
        super().__init__(daemon=True)
        self.readings: list[Reading] = []
        self.problem: str | None = None
        self._reader = reader
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            read = self._reader()
            while not self._ended.is_set():
                self.readings.append(read())
                self._ended.wait(INTERVAL_S)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def between(self, first_s: float, last_s: float) -> dict[str, float]:
        """Median "mhz", mean "watts" and the "joules" used between two times; empty with fewer than three readings."""
        inside = [reading for reading in self.readings if first_s <= reading.at_s <= last_s]
        if len(inside) < 3:
            return {}
        found = {"mhz": statistics.median(r.mhz for r in inside), "watts": statistics.fmean(r.watts for r in inside)}
        counted = [(r.at_s, r.joules) for r in self.readings if r.joules is not None]
        if counted:
            at_s, joules = zip(*counted, strict=True)
            before, after = np.interp([first_s, last_s], at_s, joules)
            found["joules"] = float(after - before)
        return found

    def steady(self, run: Callable[[], object], scale: int = 1) -> dict[str, float]:
        """Run repeatedly for `SETTLE_S` + `READ_S` seconds without a pause; return the figures of the last `READ_S`.

        scale  divides both times
        -> mean "ms" of a run and, where the card is read, "mhz", "watts" and the "joules" of a run
        """
        settle_ms, read_ms = 1e3 * SETTLE_S / scale, 1e3 * READ_S / scale
        began = _mark()
        for _ in range(WARM_RUNS):
            run()
        marks = [_mark()]
        _wait(marks[0])
        piece = max(1, round(PIECE_MS * WARM_RUNS / max(_ms(began, marks[0]), 1e-3)))
        while len(marks) < 4 or _ms(marks[0], marks[-3]) < settle_ms + read_ms:
            for _ in range(piece):
                run()
            marks.append(_mark())
            _wait(marks[max(len(marks) - 3, 0)])  # two pieces stay queued
        _wait(marks[-1])
        ended_s = time.perf_counter()
        first = max(i for i, mark in enumerate(marks) if _ms(mark, marks[-1]) >= read_ms)
        total_ms, num_runs = _ms(marks[first], marks[-1]), piece * (len(marks) - 1 - first)
        found = self.between(ended_s - total_ms / 1e3, ended_s)
        if "joules" in found:
            found["joules"] /= num_runs
        return {"ms": total_ms / num_runs, **found}


# A mark is an event in the queue of the GPU; without a GPU, the time here.


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _wait(mark: Any) -> None:
    if not isinstance(mark, float):
        mark.synchronize()


def _ms(first: Any, last: Any) -> float:
    return 1e3 * (last - first) if isinstance(first, float) else float(first.elapsed_time(last))
