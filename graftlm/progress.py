"""Progress on standard error while engines run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    """One bar per engine: how many calls it has answered, polled while it runs.

    The first engine of a pipeline shows how many calls there are; the others then count up to that number.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._num_calls: dict[str, int] = {}

    @contextmanager
    def watch(self, pipeline: str, engine: str, num_answered: Callable[[], int]) -> Iterator[Callable[[str], None]]:
        """Show one engine's run. Yields a function that says what the engine is doing now."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), disable=self._quiet) as bars:
            task = bars.add_task(f"{pipeline} on {engine}: loading", total=self._num_calls.get(pipeline))
            ended = threading.Event()

            def poll() -> None:
                while not ended.wait(0.1):
                    bars.update(task, completed=num_answered())

            poller = threading.Thread(target=poll, daemon=True)
            poller.start()
            try:
                yield lambda what: bars.update(task, description=f"{pipeline} on {engine}: {what}")
            finally:
                ended.set()
                poller.join()
                self._num_calls.setdefault(pipeline, num_answered())
                bars.update(task, completed=num_answered(), total=num_answered())
