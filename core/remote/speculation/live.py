"""Answers that are still being received, and values that are streamed from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from graftlm.core.remote.transport.answer import Answer
from graftlm.core.scheduling.stop_strings import StopMatcher

Follow = Callable[[Answer], None]
"""Receives the partial answer."""


class LiveAnswer:
    """An answer that a task receives. Used on the loop of endpoints; any thread may read `answer` and `complete`."""

    def __init__(self) -> None:
        self.answer = Answer("", "length")
        self.complete = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._after: list[Follow] = []

    async def read(self, asked: Callable[[Follow], Coroutine[Any, Any, Answer]]) -> None:
        """Request the answer and receive it to its end. Errors are raised in `grow`."""
        try:
            self.answer = await asked(self._push)
            self.complete = True
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._changed.set()
        for told in self._after:
            told(self.answer)

    async def grow(self) -> None:
        """Wait for more; raise the error that ended the answer."""
        if not self.complete and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    def then(self, told: Follow) -> None:
        """Call `told` with the answer once it is complete."""
        if self.complete:
            told(self.answer)
        else:
            self._after.append(told)

    def _push(self, answer: Answer) -> None:
        self.answer = answer
        self._changed.set()


class Told:
    """A stream of one value's final characters.

    stops  stop strings; neither they nor their prefixes are streamed.
    safe   returns the number of characters that the constraint keeps.
    """

    def __init__(
        self, tell: Callable[[str], None], stops: Sequence[str], safe: Callable[[str], int] | None = None
    ) -> None:
        self.text = ""
        self._tell = tell
        self._stops = stops
        self._safe = safe

    def grow(self, value: str) -> None:
        """Stream the new characters of the value so far."""
        sure = StopMatcher(self._stops).push(value).text
        if self._safe is not None:
            sure = sure[: self._safe(sure)]
        if len(sure) > len(self.text) and sure.startswith(self.text):
            piece, self.text = sure[len(self.text) :], sure
            self._tell(piece)
