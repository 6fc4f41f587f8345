from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from graftlm.core.errors import ConfigError
from graftlm.core.media.item_store import ItemStore
from graftlm.core.media.items import MediaItem


def item(digest: bytes, num_bytes: int = 8) -> MediaItem:
    return MediaItem(
        "image", digest, "", np.zeros(1, np.int32), 1, 0, {"pixel_values": np.zeros(num_bytes, "u1")}, True
    )


def test_threads_that_ask_for_one_picture_make_it_once() -> None:
    store, made, both = ItemStore(1000), [], threading.Barrier(4)

    def make() -> MediaItem:
        made.append(1)
        return item(b"a")

    def ask(_: int) -> MediaItem:
        both.wait()
        return store.of_file(b"file", lambda: store.of_pixels(b"a", make))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert len(made) == 1 and all(one is found[0] for one in found)


def test_a_picture_that_fails_is_tried_again() -> None:
    store = ItemStore(1000)

    def fail() -> MediaItem:
        raise ConfigError("broken")

    with pytest.raises(ConfigError, match="broken"):
        store.of_file(b"file", fail)
    assert store.of_file(b"file", lambda: item(b"a")).digest == b"a"


def test_the_least_recently_used_item_goes_first() -> None:
    store = ItemStore(20)
    first = store.of_pixels(b"a", lambda: item(b"a"))
    store.of_pixels(b"b", lambda: item(b"b"))
    assert store.of_pixels(b"a", lambda: item(b"a")) is first
    store.of_pixels(b"c", lambda: item(b"c"))
    assert store.of_pixels(b"a", lambda: item(b"a")) is first
    again = item(b"b")
    assert store.of_pixels(b"b", lambda: again) is again
