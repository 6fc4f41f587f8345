import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import EngineError
from graftlm.core.kv.pages import PagePool, coalesce
from graftlm.kernels.wire_plan import Extent, clip_range


def test_allocation_takes_one_extent_where_one_fits() -> None:
    pool = PagePool(10)
    assert pool.allocate(4) == [Extent(0, 4)]
    assert pool.num_free == 6


def test_allocation_takes_several_extents_when_none_is_large_enough() -> None:
    pool = PagePool(10)
    pool.allocate(10)
    pool.free([Extent(0, 3), Extent(5, 8)])
    assert pool.allocate(5) == [Extent(0, 3), Extent(5, 7)]


def test_allocation_takes_the_first_of_the_smallest_extents_that_are_large_enough() -> None:
    pool = PagePool(20)
    pool.allocate(20)
    pool.free([Extent(0, 6), Extent(8, 11), Extent(14, 17)])
    assert pool.allocate(3) == [Extent(8, 11)]
    assert pool.allocate(2) == [Extent(14, 16)]
    assert pool.num_pieces(7) == 2
    assert pool.allocate(7) == [Extent(0, 6), Extent(16, 17)]


def test_allocation_beyond_what_is_free_takes_nothing() -> None:
    pool = PagePool(4)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_grow_takes_only_slots_that_follow() -> None:
    pool = PagePool(10)
    (first,) = pool.allocate(4) or []
    assert pool.grow(first, 3) == Extent(4, 7)
    assert pool.grow(first, 3) is None


def test_freeing_twice_raises() -> None:
    pool = PagePool(4)
    pool.allocate(4)
    pool.free([Extent(0, 2)])
    with pytest.raises(EngineError, match="freed twice"):
        pool.free([Extent(1, 3)])


def test_freed_neighbours_become_one_extent() -> None:
    pool = PagePool(9)
    pool.allocate(9)
    for extent in (Extent(0, 3), Extent(6, 9), Extent(3, 6)):
        pool.free([extent])
    assert pool.allocate(9) == [Extent(0, 9)]


def test_clip_range_cuts_across_extents() -> None:
    assert clip_range([Extent(0, 3), Extent(10, 14)], 2, 5) == [Extent(2, 3), Extent(10, 12)]


def test_coalesce_joins_only_what_follows() -> None:
    assert coalesce([Extent(0, 2), Extent(2, 4), Extent(6, 7)]) == [Extent(0, 4), Extent(6, 7)]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=30))
def test_every_slot_is_free_or_held_once(operations: list[tuple[bool, int]]) -> None:
    pool, held = PagePool(40), []
    for give_back, size in operations:
        if give_back and held:
            pool.free(held.pop(size % len(held)))
        elif taken := pool.allocate(size):
            held.append(taken)
        slots = [s for extents in held for e in extents for s in range(e.start, e.stop)]
        assert len(slots) == len(set(slots)) == 40 - pool.num_free
        largest = max((n for n in range(1, pool.num_free + 1) if pool.num_pieces(n) == 1), default=0)
        free = "".join("." if slot in slots else "x" for slot in range(40)).split(".")
        assert largest == max(map(len, free))
