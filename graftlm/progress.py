"""Progress on standard error while engines run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    """Progress bars, one per step of an engine, that show its answered model calls.

    The first round of an engine measures the number of calls, which is the length of the bars of its later rounds.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._num_calls: dict[tuple[str, str], int] = {}

    @contextmanager
    def watch(self, pipeline: str, engine: str, doing: str) -> Iterator[Callable[[int], None]]:
        """Show one step. Yields a function that takes the number of calls so far."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=self._quiet) as bars:
            total = self._num_calls.get((pipeline, engine)) if doing.startswith("round") else None
            task = bars.add_task(f"{pipeline} on {engine}: {doing}", total=total)
            seen = 0

            def on_calls(calls: int) -> None:
                nonlocal seen
                seen = calls
                bars.update(task, completed=calls)

            yield on_calls
            if seen:
                self._num_calls[pipeline, engine] = max(seen, self._num_calls.get((pipeline, engine), 0))
            bars.update(task, completed=seen or 1, total=seen or 1)
