from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from graftlm.core.serving.loop_inbox import inbox_of


async def test_what_is_posted_in_one_turn_wakes_the_loop_once_and_keeps_its_order() -> None:
    loop, wakes, seen = asyncio.get_running_loop(), [], list[int]()
    wake = loop.call_soon_threadsafe

    def counted(function: Callable[..., object], *args: Any, **options: Any) -> asyncio.Handle:
        wakes.append(function)
        return wake(function, *args, **options)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
    for number in range(5):
        inbox_of(loop).post(partial(seen.append, number))
    await asyncio.sleep(0)
    assert (seen, len(wakes)) == ([0, 1, 2, 3, 4], 1)


async def test_threads_that_post_at_the_same_time_lose_nothing() -> None:
    inbox, seen, over = inbox_of(asyncio.get_running_loop()), list[int](), asyncio.Event()

    def see(number: int) -> None:
        seen.append(number)
        if len(seen) == 8000:
            over.set()

    def post(first: int) -> None:
        for number in range(first, first + 1000):
            inbox.post(partial(see, number))

    threads = [threading.Thread(target=post, args=(1000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(over.wait(), 60)
    assert sorted(seen) == list(range(8000))
    assert [n for n in seen if n < 1000] == list(range(1000))


def test_one_that_raises_ends_alone_and_one_that_ends_the_loop_leaves_the_others_for_its_next_run() -> None:
    loop, seen = asyncio.new_event_loop(), list[str]()
    inbox = inbox_of(loop)

    def fail(error: BaseException) -> None:
        raise error

    for call in (partial(fail, ValueError()), partial(seen.append, "a"), partial(fail, SystemExit())):
        inbox.post(call)
    inbox.post(partial(seen.append, "b"))
    with pytest.raises(SystemExit):
        loop.run_until_complete(asyncio.sleep(0.1))
    assert seen == ["a"]
    loop.run_until_complete(asyncio.sleep(0))
    assert seen == ["a", "b"]
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        inbox.post(partial(seen.append, "c"))
    with pytest.raises(RuntimeError, match="closed"):  # and it is tried again
        inbox.post(partial(seen.append, "d"))
