"""Holds change the order of eviction by when callers return, end with the return, and learn the pauses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graftlm as gl
from graftlm.core.kv.radix import RadixTree
from graftlm.core.kv.waits import DEFAULT_S, LATE, Waits
from graftlm.kernels.wire_plan import Extent
from tests.models import byte_tokenizer, random_prompt, tiny_model

LENGTH = 4


def ids_of(number: int) -> np.ndarray:
    return np.full(LENGTH, number, np.int32)


class Holds:
    """A tree of four cached prefixes, used in the order of their numbers, and a clock."""

    def __init__(self, *, moves: bool) -> None:
        self.tree = RadixTree()
        for number in range(4):
            self.tree.insert(ids_of(number), [Extent(number * LENGTH, (number + 1) * LENGTH)], 0)
        self.now = 0.0
        self.waits = Waits(self.tree, lambda: moves, lambda: self.now)

    def hold(self, number: int, seconds: float | None, label: str = "") -> None:
        self.waits.hold_ids(number, ids_of(number), "", seconds, label)

    def evicted(self) -> list[int]:
        order = []
        while freed := self.tree.evict(LENGTH):
            order += [extent.start // LENGTH for extent in freed]
        return order


@pytest.mark.parametrize(("moves", "order"), [(False, [1, 3, 0, 2]), (True, [0, 1, 3, 2])])
def test_of_held_prefixes_that_of_the_latest_return_goes_first(moves: bool, order: list[int]) -> None:
    """With host memory a long wait goes before all others; a short one stays in either case."""
    holds = Holds(moves=moves)
    holds.hold(0, 5.0)
    holds.hold(2, 0.1)
    assert holds.evicted() == order


def test_a_hold_ends_with_the_return_whose_pause_is_expected_next_time() -> None:
    holds = Holds(moves=False)
    holds.hold(0, None, "search")
    holds.now = 3.0
    holds.waits.started(np.concatenate([ids_of(0), ids_of(9)]), "another tenant")
    assert len(holds.waits) == 1
    holds.waits.started(np.concatenate([ids_of(0), ids_of(9)]), "")
    assert len(holds.waits) == 0 and holds.waits.mean_s == {"search": 3.0}
    holds.hold(0, None, "search")
    holds.hold(1, None, "other")
    assert holds.evicted() == [2, 3, 0, 1]


def test_a_hold_without_a_return_ends_by_itself() -> None:
    holds = Holds(moves=False)
    holds.hold(0, None)
    holds.now = LATE * DEFAULT_S + 1.1
    holds.waits.expire()
    assert len(holds.waits) == 0 and holds.evicted() == [0, 1, 2, 3]


def test_part_of_a_held_prefix_that_others_share_is_held_too() -> None:
    tree = RadixTree()
    tree.insert(np.array([1, 2, 3, 4], np.int32), [Extent(0, 4)], 0)
    waits = Waits(tree, lambda: False)
    waits.hold_ids(1, np.array([1, 2, 3, 4], np.int32), "", 5.0, "")
    tree.insert(np.array([1, 2, 7, 8], np.int32), [Extent(0, 2), Extent(4, 6)], 2)
    assert tree.evict(4) == [Extent(4, 6), Extent(2, 4)]
    waits.release(1)
    assert tree.evict(4) == [Extent(0, 2)]


def test_programs_and_prompts_hold_until_they_go_on() -> None:
    @gl.program(temperature=0)
    def agent(s: Any) -> Any:
        s += "Weather in Rome? " + gl.gen("call", max_tokens=4, ignore_eos=True)
        s["call"]
        with s.hold(30.0):
            s.wait()  # until the program's thread has passed the hold on
            held = waits()
        s += "sunny " + gl.gen("answer", max_tokens=4, ignore_eos=True)
        return held

    with gl.Runtime(tiny_model(), tokenizer=byte_tokenizer(), quiet=True) as runtime:

        def waits() -> int:
            runtime.stats()
            engine: Any = runtime._thread.engine
            found: int = runtime._thread.call(lambda _: len(engine.cache.waits))
            return found

        for _ in range(2):
            state = agent.run(runtime=runtime)
            assert state.result == 1 and state["answer"] and waits() == 0
        prompt = random_prompt(40)
        with runtime.hold(runtime.generate(prompt, max_tokens=2), 30.0, label="tool"):
            assert waits() == 1
            runtime.generate(prompt + [5], max_tokens=1)
            assert waits() == 0
        held = runtime.hold(prompt, 30.0)
        assert waits() == 1
        held.release()
        assert waits() == 0
        for seconds in (0, -1.0, float("nan"), "2"):
            with pytest.raises(gl.ConfigError, match="seconds is"):
                runtime.hold(prompt, seconds)  # type: ignore[arg-type]
