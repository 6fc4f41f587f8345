"""ItemStore: processed pictures and videos on the host, by digest; each is made once, however many threads ask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from graftlm.core.media.items import MediaItem

_MOST_FILES = 4096
"""Files whose digest is kept, 100 bytes each."""


class ItemStore:
    """Items by the digest of their pixels, the least recently used go first.

    max_bytes  limit of the inputs of all items but the last
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[bytes, MediaItem] = OrderedDict()
        self._files: OrderedDict[bytes, bytes] = OrderedDict()  # digests of encoded bytes -> of pixels
        self._making: dict[bytes, Future[MediaItem]] = {}

    def of_file(self, file: bytes, load: Callable[[], MediaItem]) -> MediaItem:
        """Return the item of encoded bytes: a kept one, or that of `load`, which decodes them.

        file  digest of the bytes
        """
        found = self._once(file, lambda: self._kept(self._files.get(file)), load)
        with self._lock:
            self._files[file] = found.digest
            self._files.move_to_end(file)
            while len(self._files) > _MOST_FILES:
                self._files.popitem(last=False)
        return found

    def of_known_file(self, file: bytes) -> MediaItem | None:
        """Return the kept item of encoded bytes; None if there is none. file: digest of the bytes"""
        with self._lock:
            found = self._kept(self._files.get(file))
            if found is not None:
                self._files.move_to_end(file)
            return found

    def of_pixels(self, digest: bytes, make: Callable[[], MediaItem]) -> MediaItem:
        """Return the item of pixels: a kept one, or that of `make`, which processes them."""

        def made() -> MediaItem:
            item = make()
            with self._lock:
                self._add(item)
            return item

        return self._once(digest, lambda: self._kept(digest), made)

    def clear(self) -> None:
        """Drop all items; those under way are still returned to who waits for them."""
        with self._lock:
            self._items.clear()
            self._num_bytes = 0

    def _once(self, key: bytes, kept: Callable[[], MediaItem | None], make: Callable[[], MediaItem]) -> MediaItem:
        with self._lock:
            found = kept()
            if found is not None:
                return found
            future = self._making.get(key)
            mine = future is None
            if future is None:
                future = self._making[key] = Future()
        if not mine:
            return future.result()
        try:
            found = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._making[key]
        future.set_result(found)
        return found

    def _kept(self, digest: bytes | None) -> MediaItem | None:
        found = self._items.get(digest) if digest is not None else None
        if found is not None:
            self._items.move_to_end(found.digest)
        return found

    def _add(self, item: MediaItem) -> None:
        self._items[item.digest] = item
        self._num_bytes += item.num_bytes
        while self._num_bytes > self._max_bytes and len(self._items) > 1:
            _, gone = self._items.popitem(last=False)
            self._num_bytes -= gone.num_bytes
