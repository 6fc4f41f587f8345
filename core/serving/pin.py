"""Pin: a prefix that stays in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from graftlm.core.serving.engine_thread import EngineThread


class Pin:
    """A warmed prefix of `num_tokens` tokens; evictable again after `unpin()`."""

    def __init__(self, thread: EngineThread, pin: int | None, num_tokens: int) -> None:
        self._thread = thread
        self._pin = pin
        self.num_tokens = num_tokens

    def unpin(self) -> None:
        """Make the prefix evictable. Idempotent, and allowed after the runtime was closed."""
        pin, self._pin = self._pin, None
        if pin is not None:
            self._thread.post(lambda engine: engine.unpin(pin))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpin()
