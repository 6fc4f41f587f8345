"""Listeners that pass results from the engine's thread to futures, threads and event loops."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakMethod, ref

import numpy as np

from graftlm.core.errors import GraftError
from graftlm.core.request import Chunk, Completion
from graftlm.core.serving.caller_waves import WakeChain
from graftlm.core.serving.loop_inbox import inbox_of

if TYPE_CHECKING:
    from graftlm.core.serving.engine_thread import EngineThread

_Item = Chunk | BaseException | None
_Result = TypeVar("_Result")


class EngineFuture(Future[_Result]):
    """A future of an engine's result; waiting for it on that engine's thread raises instead of deadlocking."""

    def __init__(self, thread: EngineThread) -> None:
        super().__init__()
        self._thread = ref(thread)  # a kept result must not keep the engine
        self._waiters = _Waiters(self)  # type: ignore[assignment]

    def result(self, timeout: float | None = None) -> _Result:
        self._check("a future's result()", timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check("a future's exception()", timeout)
        return super().exception(timeout)

    def _check(self, name: str, timeout: float | None) -> None:
        if timeout != 0 and not self.done() and (thread := self._thread()) is not None:
            thread.check_may_wait(name)


class _Waiters(list[object]):
    """The waiters of a future. `concurrent.futures.wait` and `as_completed` append theirs when they have to wait."""

    def __init__(self, future: EngineFuture[Any]) -> None:
        super().__init__()
        self._future = ref(future)

    def append(self, waiter: object) -> None:
        future = self._future()
        if future is not None:
            future._check("concurrent.futures.wait() or as_completed()", None)
        super().append(waiter)


def pass_logits(outer: Future[np.ndarray], inner: Future[Completion]) -> None:
    """Resolve `outer` with the logits of the completion of `inner`, its error, or its cancellation."""
    if outer.cancelled() or inner.cancelled():
        outer.cancel()
    elif (error := inner.exception()) is not None:
        outer.set_exception(error)
    else:
        logits = inner.result().logits
        outer.set_result(logits if logits is not None else np.empty(0, np.float32))


@contextmanager
def cancelled_on_error(futures: Sequence[Future[Any] | asyncio.Future[Any]]) -> Iterator[None]:
    """Cancel futures when the `with` block fails or is interrupted."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def pass_cancel(cancel: WeakMethod[Callable[[int], None]], submission_id: int, future: Any) -> None:
    """Cancel the submission of a cancelled future, if its runtime still exists."""
    owner = cancel()
    if future.cancelled() and owner is not None:
        with suppress(GraftError):
            owner(submission_id)


async def results(futures: Sequence[asyncio.Future[_Result]]) -> list[_Result]:
    """Wait for all results. If the task is cancelled or a future fails, the remaining futures are cancelled."""
    try:
        return [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        raise


class FutureListener:
    """A listener that resolves a future, unless that was cancelled. Chunks go to `on_chunk`, if given."""

    def __init__(self, future: Future[Completion], on_chunk: Callable[[Chunk], None] | None = None) -> None:
        self.future = future
        self._on_chunk = on_chunk

    def on_chunk(self, chunk: Chunk) -> None:
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    def on_finish(self, completion: Completion) -> None:
        with suppress(InvalidStateError):
            self.future.set_result(completion)

    def on_error(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.future.set_exception(error)


class Answer:
    """The answer to one request, for one waiting thread. Cheaper than a future: a single lock.

    The lock is held until the request has ended; the waiting thread then acquires it.

    chain  wakes the threads that were answered in the same step, one after the other
    """

    __slots__ = ("_chain", "_completion", "_error", "_on_chunk", "_open")

    def __init__(self, on_chunk: Callable[[Chunk], None] | None = None, chain: WakeChain | None = None) -> None:
        self._on_chunk = on_chunk
        self._chain = chain
        self._completion: Completion | None = None
        self._error: BaseException | None = None
        self._open = threading.Lock()
        self._open.acquire()

    @property
    def ended(self) -> bool:
        return self._completion is not None or self._error is not None

    def wait(self) -> Completion:
        """Wait for the completion, once; raise the error that ended the request."""
        chain = self._chain
        try:
            self._open.acquire()
        except BaseException:
            self._chain = None  # this thread wakes no further one
            raise
        finally:
            if chain is not None:
                chain.awake()
        if self._completion is not None:
            return self._completion
        assert self._error is not None
        try:
            raise self._error
        finally:
            del self  # break the cycle between a kept error and this frame

    def on_chunk(self, chunk: Chunk) -> None:
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    def on_finish(self, completion: Completion) -> None:
        if not self.ended:
            self._completion = completion
            self._wake()

    def on_error(self, error: BaseException) -> None:
        if not self.ended:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._chain is None:
            self._open.release()
        else:
            self._chain.wake(self._open)


class AsyncListener:
    """A listener that resolves `future`, which belongs to an event loop, unless that was cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Completion] = loop.create_future()
        self._inbox = inbox_of(loop)

    def on_chunk(self, chunk: Chunk) -> None:
        """Ignore the chunk."""

    def on_finish(self, completion: Completion) -> None:
        self._post(self.future.set_result, completion)

    def on_error(self, error: BaseException) -> None:
        self._post(self.future.set_exception, error)

    def _post(self, settle: Callable[[Any], None], outcome: Any) -> None:
        def act() -> None:
            if not self.future.done():
                settle(outcome)

        with suppress(RuntimeError):  # the loop is closed
            self._inbox.post(act)


class StreamListener:
    """A listener that queues chunks for a thread, or for the event loop of its creator. None ends the stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._inbox = None if loop is None else inbox_of(loop)
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._async_queue: asyncio.Queue[_Item] = asyncio.Queue()
        self.ended = False
        self.completion: Completion | None = None

    def on_chunk(self, chunk: Chunk) -> None:
        self._put(chunk)

    def on_finish(self, completion: Completion | None) -> None:
        self.completion = completion
        self.ended = True
        self._put(None)

    def on_error(self, error: BaseException) -> None:
        self.ended = True
        self._put(error)

    def next(self) -> Chunk | None:
        """Return the next chunk, or None at the end; raise the error that ended the request."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    async def chunks(self) -> AsyncIterator[Chunk]:
        while (item := await self._async_queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _put(self, item: _Item) -> None:
        if self._inbox is None:
            self._queue.put(item)
            return
        with suppress(RuntimeError):  # the loop is closed
            self._inbox.post(partial(self._async_queue.put_nowait, item))


class ChunkStream(Iterator[Chunk]):
    """The chunks of one answer. `completion` is set once the last one has been read."""

    def __init__(
        self, listener: StreamListener, cancel: Callable[[], None], check_may_wait: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._cancel = cancel
        self._check_may_wait = check_may_wait
        self._done = False

    def __next__(self) -> Chunk:
        if self._done:
            raise StopIteration
        self._check_may_wait("reading a stream")
        try:
            chunk = self._listener.next()
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self._done = True
            raise StopIteration
        return chunk

    @property
    def completion(self) -> Completion | None:
        return self._listener.completion

    def close(self) -> None:
        """Stop reading: cancel an unfinished request and free its KV."""
        if not self._done:
            self._done = True
            if not self._listener.ended:
                self._cancel()

    def __enter__(self) -> ChunkStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
