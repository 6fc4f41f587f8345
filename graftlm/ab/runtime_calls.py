"""Calls of GraftLM's runtimes, followed from their submission to their end: futures, streams and event loops alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlm.core.request import Chunk, Completion, Listener, Request

End = Callable[["Completion | None", "BaseException | None"], None]


class Followed:
    """Stands before a request's listener. `end` is told its completion or its error, before the caller is."""

    def __init__(self, listener: Listener, end: End, chunk: Callable[[], None] | None, wants_chunks: bool) -> None:
        self._listener, self._end, self._chunk, self._wants_chunks = listener, end, chunk, wants_chunks

    def on_chunk(self, chunk: Chunk) -> None:
        if self._chunk is not None:
            self._chunk()
        if self._wants_chunks:
            self._listener.on_chunk(chunk)

    def on_finish(self, completion: Completion) -> None:
        self._end(completion, None)
        self._listener.on_finish(completion)

    def on_error(self, error: BaseException) -> None:
        self._end(None, error)
        self._listener.on_error(error)


def follow(
    runtime: Any, begun: Callable[[list[Request]], list[End]], chunk: Callable[[End], Callable[[], None]] | None = None
) -> Callable[[], None]:
    """Follow every request of a runtime from now on, until the returned function is called.

    begun  is told the requests of one submission; what each one's end is told to
    chunk  what is called at each chunk of an answer, by its end; then every answer comes in chunks
    """
    prepare = runtime._prepare

    def prepared(requests: Any, listeners: Any) -> Any:
        ends = begun(list(requests))
        followed = [
            Followed(listener, end, None if chunk is None else chunk(end), request.stream)
            for request, listener, end in zip(requests, listeners, ends, strict=True)
        ]
        asked = requests if chunk is None else [_in_chunks(request) for request in requests]
        given = prepare(asked, followed)
        for one, end in zip(given, ends, strict=True):
            if isinstance(one, BaseException):  # it never reaches the engine, nor its listener here
                end(None, one)
        return given

    runtime._prepare = prepared

    def undo() -> None:
        runtime._prepare = prepare

    return undo


def _in_chunks(request: Request) -> Request:
    generates = request.score_ids is None and not request.want_logits
    return replace(request, stream=True) if generates else request
