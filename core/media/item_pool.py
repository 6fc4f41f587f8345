"""ItemPool: the threads that read pictures and videos. A known one is found at once, one under way is read once."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from graftlm.core.chat.messages import ImagePart, VideoPart
from graftlm.core.errors import ConfigError, GraftError, failure_of

if TYPE_CHECKING:
    from graftlm.core.media.items import MediaItem

Part = ImagePart | VideoPart

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that decode and process pictures. Pillow and torch release the GIL; each thread computes on one core."""


class Reads(Protocol):
    """Returns the item of a picture or a video, alone or among several in a prompt."""

    def __call__(self, part: Part, *, among_several: bool) -> MediaItem: ...


class Finds(Protocol):
    """Returns the item of a picture that is known; None for others. Raises nothing."""

    def __call__(self, part: Part, *, among_several: bool) -> MediaItem | None: ...


class Pending:
    """An item to come. It holds the object that the item is read from, by whose identity others find it."""

    __slots__ = ("__weakref__", "_future", "_source")

    def __init__(self, source: object, future: Future[MediaItem]) -> None:
        self._source, self._future = source, future

    def item(self, place: str = "") -> MediaItem | GraftError:
        """Wait for the item; return its error instead if it cannot be read. place: of the part, named in the error"""
        try:
            return self._future.result()
        except ConfigError as error:
            if not place:
                return error
            named = ConfigError(f"{place}: {error}")
            named.__cause__ = error
            return named
        except Exception as error:  # Pillow and processors raise any error
            return failure_of(error)


class ItemPool:
    """Items by the objects that callers give for them, as long as somebody holds the item to come.

    read  reads one, on a thread of the pool
    find  finds a known one, on the caller's thread
    """

    def __init__(self, read: Reads, find: Finds) -> None:
        self._read, self._find = read, find
        self._lock = threading.Lock()
        self._under_way: WeakValueDictionary[object, Pending] = WeakValueDictionary()

    def begin(self, part: Part, *, among_several: bool) -> Pending:
        """Return the item of a part, to come: a known one, one that is under way, or one that a thread reads."""
        if isinstance(part, ImagePart):
            source, options = part.image, repr(part.mm_processor_kwargs)
        else:
            source, options = part.video, f"{part.num_frames} {part.fps}"
        key = type(part), id(source), among_several, options
        found = self._under_way.get(key)
        if found is not None:
            return found
        known = self._find(part, among_several=among_several)
        with self._lock:
            found = self._under_way.get(key)
            if found is None:
                work = partial(self._read, part, among_several=among_several)
                found = Pending(source, _done(known) if known is not None else self._threads.submit(work))
                self._under_way[key] = found
        return found

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        import torch

        return ThreadPoolExecutor(THREADS, "graftlm pictures", initializer=partial(torch.set_num_threads, 1))


def _done(item: MediaItem) -> Future[MediaItem]:
    future: Future[MediaItem] = Future()
    future.set_result(item)
    return future
