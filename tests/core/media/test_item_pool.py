"""The pool that reads pictures: each object once at a time, known ones on the caller's thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from graftlm.core.chat.messages import ImagePart
from graftlm.core.errors import ConfigError, EngineError
from graftlm.core.media.item_pool import ItemPool
from graftlm.core.media.items import MediaItem

ITEM = MediaItem("image", b"a", "", np.zeros(1, np.int32), 1, 0, {}, True)


def nothing(part: Any, *, among_several: bool) -> None:
    """Know no picture."""


def test_an_object_under_way_is_read_once() -> None:
    begun, go = [], threading.Event()

    def read(part: Any, *, among_several: bool) -> MediaItem:
        begun.append(among_several)
        go.wait(60)
        return ITEM

    pool, picture = ItemPool(read, nothing), b"picture"
    both = [pool.begin(ImagePart(picture), among_several=False) for _ in range(2)]
    other = pool.begin(ImagePart(picture, mm_processor_kwargs={"max_pixels": 1}), among_several=False)
    go.set()
    assert both[0] is both[1] is not other
    assert [one.item() for one in (*both, other)] == [ITEM] * 3 and len(begun) == 2
    del both
    assert pool.begin(ImagePart(picture), among_several=False).item() is ITEM and len(begun) == 3


def test_a_known_picture_is_looked_up_once_and_needs_no_thread() -> None:
    asked = []

    def unread(part: Any, *, among_several: bool) -> MediaItem:
        raise AssertionError("a known picture was read")

    def find(part: Any, *, among_several: bool) -> MediaItem:
        asked.append(part)
        return ITEM

    pool, part = ItemPool(unread, find), ImagePart(b"picture")
    held = [pool.begin(part, among_several=False) for _ in range(3)]
    assert [one.item() for one in held] == [ITEM] * 3 and len(asked) == 1
    assert "_threads" not in vars(pool)


def test_an_error_names_the_place_of_its_own_part() -> None:
    errors = [ConfigError("broken"), ZeroDivisionError("by 0")]

    def read(part: Any, *, among_several: bool) -> MediaItem:
        raise errors[part.image]

    pool = ItemPool(read, nothing)
    one, other = (pool.begin(ImagePart(number), among_several=False) for number in range(2))
    assert [str(one.item(place)) for place in ("message 0", "message 2", "")] == [
        "message 0: broken",
        "message 2: broken",
        "broken",
    ]
    assert isinstance(other.item("message 1"), EngineError)
