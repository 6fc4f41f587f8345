"""Plans through shared memory: every array arrives as it was, in order, however long it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest

from graftlm.core.tensor_parallel.plan_ring import CHUNK, SLOTS, PlanRing, memory_bytes, new_memory
from graftlm.kernels.wire_plan import Row, SharedPrefix, WirePlan


@pytest.fixture
def rings() -> Iterator[tuple[PlanRing, PlanRing]]:
    fd = new_memory("graftlm-test", memory_bytes())
    yield PlanRing(fd, 0, 2), PlanRing(fd, 1, 2)
    os.close(fd)


def plan_of(num_new: int, sources: bool) -> WirePlan:
    rows = [Row(0, 1, 4, [(0, 3), (9, 12)]), Row(1, num_new, 0, [(20, 20 + num_new)])]
    made = WirePlan.of(rows, range(num_new + 1), [0, num_new], [SharedPrefix(3, (0, 1))])
    found = {each.name: getattr(made, each.name) for each in fields(WirePlan)}
    found["state_copies"] = np.array([[3, 2], [5, 4]])
    found["token_sources"] = np.full(num_new + 1, -1, np.int32) if sources else None
    found["grid"] = np.arange(3 * num_new + 3).reshape(3, -1) if sources else None
    found["until_windowed"] = sources
    return WirePlan(**found)


def same(one: WirePlan, other: WirePlan) -> bool:
    pairs = [(getattr(one, each.name), getattr(other, each.name)) for each in fields(WirePlan)]
    return all(a is b or type(a) is type(b) and np.array_equal(a, b) for a, b in pairs)


def test_plans_arrive_in_order_and_unchanged(rings: tuple[PlanRing, PlanRing]) -> None:
    plans = [plan_of(1 + number % 5, sources=number % 2 == 0) for number in range(3 * SLOTS)]
    plans.insert(4, plan_of(CHUNK // 10, sources=True))  # longer than a slot
    found: list[WirePlan] = []
    reader = threading.Thread(target=lambda: found.extend(rings[1].read() for _ in plans), daemon=True)
    reader.start()
    for plan in plans:
        rings[0].write(plan, lambda: None)
    reader.join(120)
    assert all(map(same, plans, found)) and len(found) == len(plans)
    assert found[0].rows == plans[0].rows and found[0].shared == plans[0].shared


def test_a_full_ring_waits_no_longer_than_the_check_allows(rings: tuple[PlanRing, PlanRing]) -> None:
    def gone() -> None:
        raise RuntimeError("rank 1 died")

    for _ in range(SLOTS):
        rings[0].write(plan_of(2, sources=False), gone)
    with pytest.raises(RuntimeError, match="rank 1 died"):
        rings[0].write(plan_of(2, sources=False), gone)


def test_a_rank_that_is_behind_in_its_sums_is_waited_for(rings: tuple[PlanRing, PlanRing]) -> None:
    leader, follower = rings
    assert leader.awaits(1) is None
    leader.summing(1)
    assert leader.awaits(1) == 1
    follower.summing(1)
    assert leader.awaits(1) is None
    follower.summed()
    leader.summing(2)
    leader.summed()
    assert leader.awaits(1) is None
