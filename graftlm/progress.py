"""Progress on standard error while engines run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress as Bars, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text


class _Seconds(ProgressColumn):
    """The time of a step. Most steps take less than a second, which rich's own column shows as 0:00:00."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.fields.get('took_s', task.elapsed) or 0.0:.1f} s", "progress.elapsed")


class Waiting:
    """A line on a terminal with the seconds of a step that shows nothing else; it is gone afterwards.

    is_shown  False where standard error is no terminal
    """

    def __init__(self, doing: str) -> None:
        self.is_shown = sys.stderr.isatty()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), _Seconds())
        self._bars = Bars(*columns, console=Console(stderr=True), transient=True, disable=not self.is_shown)
        self._bars.add_task(doing)

    def __enter__(self) -> None:
        self._bars.start()

    def __exit__(self, *error: object) -> None:
        self._bars.stop()


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
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
        )
        with Bars(*columns, _Seconds(), console=Console(stderr=True), disable=self._quiet) as bars:
            is_round = doing.startswith("round")
            total = self._num_calls.get((pipeline, engine)) if is_round else None
            task = bars.add_task(f"{pipeline} on {engine}: {doing}", total=total, count="")
            seen = 0

            def on_calls(calls: int) -> None:
                nonlocal seen
                seen = calls
                bars.update(task, completed=calls, count=f"{calls:,}" if total is None else f"{calls:,}/{total:,}")

            yield on_calls
            if seen and is_round:
                self._num_calls[pipeline, engine] = max(seen, self._num_calls.get((pipeline, engine), 0))
            bars.update(task, completed=seen or 1, total=seen or 1, took_s=bars.tasks[0].elapsed)
