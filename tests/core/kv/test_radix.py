import numpy as np
from hypothesis import given, settings, strategies as st

from graftlm.core.config import CacheConfig
from graftlm.core.kv.radix import RadixTree, eviction_key
from graftlm.kernels.wire_plan import Extent


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def slots(extents: list[Extent]) -> list[int]:
    return [slot for e in extents for slot in range(e.start, e.stop)]


def two_branches() -> RadixTree:
    tree = RadixTree(page_size=2)
    tree.insert(ids(1, 2, 3, 4), [Extent(0, 4)], owned_from=0)
    tree.insert(ids(1, 2, 5, 6), [Extent(0, 2), Extent(6, 8)], owned_from=2)
    return tree


def test_match_returns_the_longest_cached_prefix_and_its_slots() -> None:
    match = two_branches().match(ids(1, 2, 5, 6, 7, 8))
    assert (match.length, slots(match.extents)) == (4, [0, 1, 6, 7])


def test_match_splits_a_node_where_the_tokens_part() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), [Extent(0, 4)], owned_from=0)
    assert slots(tree.match(ids(1, 2, 9)).extents) == [0, 1]
    assert [n.num_tokens for n in tree.nodes()] == [2, 2]
    tree.check_integrity()


def test_peek_changes_nothing() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), [Extent(0, 4)], owned_from=0)
    assert tree.peek(ids(1, 2, 9)).length == 2
    assert [n.num_tokens for n in tree.nodes()] == [4]


def test_evicting_a_leaf_frees_its_slots_and_keeps_its_parent() -> None:
    tree = two_branches()
    assert slots(tree.evict(2)) == [2, 3]  # the older leaf first
    assert slots(tree.match(ids(1, 2, 5, 6)).extents) == [0, 1, 6, 7]
    tree.check_integrity()


def test_eviction_takes_only_the_needed_tail_of_a_leaf() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), [Extent(0, 4)], owned_from=0)
    assert slots(tree.evict(1)) == [3]
    assert tree.match(ids(1, 2, 3, 4)).length == 3


def test_drop_frees_the_end_of_a_branch_that_nothing_else_uses() -> None:
    tree = two_branches()
    assert slots(tree.drop(ids(1, 2, 5, 6), keep=2)) == [6, 7]
    assert slots(tree.drop(ids(1, 2, 3, 4), keep=3)) == []  # whole pages only
    tree.lock(tree.match(ids(1, 2, 3, 4)).node)
    assert slots(tree.drop(ids(1, 2, 3, 4), keep=0)) == []
    tree.check_integrity()


def test_drop_keeps_what_another_sequence_continues() -> None:
    tree = two_branches()
    assert slots(tree.drop(ids(1, 2), keep=0)) == []
    assert slots(tree.drop(ids(1, 2, 3, 4), keep=0)) == [2, 3]
    assert slots(tree.drop(ids(1, 2, 5, 6), keep=0)) == [6, 7, 0, 1]
    assert tree.nodes() == []


def test_lfu_evicts_the_leaf_used_least() -> None:
    tree = RadixTree(key=eviction_key(CacheConfig(eviction="lfu")))
    tree.insert(ids(1, 2), [Extent(0, 2)], owned_from=0)
    tree.insert(ids(3, 4), [Extent(2, 4)], owned_from=0)
    tree.match(ids(1, 2))
    assert slots(tree.evict(2)) == [2, 3]


def test_a_callable_policy_is_a_sort_key() -> None:
    tree = RadixTree(key=eviction_key(CacheConfig(eviction=lambda node: -node.created)))
    tree.insert(ids(1, 2), [Extent(0, 2)], owned_from=0)
    tree.insert(ids(3, 4), [Extent(2, 4)], owned_from=0)
    assert slots(tree.evict(1)) == [3]  # the newest first


def test_a_locked_path_is_not_evicted() -> None:
    tree = two_branches()
    node = tree.match(ids(1, 2, 5, 6)).node
    tree.lock(node)
    assert slots(tree.evict(tree.num_evictable)) == [2, 3]
    tree.unlock(node)
    assert sorted(slots(tree.evict(tree.num_evictable))) == [0, 1, 6, 7]
    assert tree.num_tokens == 0


def test_inserting_what_another_published_meanwhile_returns_the_own_copy() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3), [Extent(0, 3)], owned_from=0)
    inserted = tree.insert(ids(1, 2, 3, 4), [Extent(10, 14)], owned_from=0)
    assert slots(inserted.duplicates) == [10, 11, 12]
    assert slots(inserted.extents) == [0, 1, 2, 13]


def test_a_page_that_is_not_full_is_given_back() -> None:
    tree = RadixTree(page_size=4)
    inserted = tree.insert(ids(1, 2, 3, 4, 5, 6), [Extent(0, 6)], owned_from=0)
    assert slots(inserted.duplicates) == [4, 5]
    assert tree.num_tokens == 4


def test_namespaces_share_nothing() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2), [Extent(0, 2)], owned_from=0, namespace="a")
    assert tree.match(ids(1, 2), namespace="b").length == 0


def test_a_lock_survives_a_split_of_its_node() -> None:
    tree = RadixTree()
    node = tree.insert(ids(1, 2, 3, 4), [Extent(0, 4)], owned_from=0).node
    tree.lock(node)
    tree.match(ids(1, 2, 9))
    assert tree.num_protected == 4 and tree.evict(4) == []
    tree.unlock(node)
    assert tree.num_protected == 0
    tree.check_integrity()


token_lists = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["insert", "match", "lock", "unlock", "evict"]), token_lists), max_size=40))
def test_counters_and_slots_agree_after_any_sequence_of_operations(operations: list[tuple[str, list[int]]]) -> None:
    tree, locked, next_slot, freed = RadixTree(), [], 0, []
    for name, tokens in operations:
        if name == "insert":
            given_slots = [Extent(next_slot, next_slot + len(tokens))]
            next_slot += len(tokens)
            freed += slots(tree.insert(ids(*tokens), given_slots, owned_from=0).duplicates)
        elif name == "match":
            match = tree.match(ids(*tokens))
            assert match.length == len(slots(match.extents)) == tree.peek(ids(*tokens)).length
        elif name == "lock":
            locked.append(tree.match(ids(*tokens)).node)
            tree.lock(locked[-1])
        elif name == "unlock" and locked:
            tree.unlock(locked.pop())
        elif name == "evict":
            before = tree.num_evictable
            out = slots(tree.evict(len(tokens)))
            assert len(out) >= min(before, len(tokens))
            freed += out
        tree.check_integrity()
        held = slots([n.extent for n in tree.nodes()])
        assert sorted(held + freed) == list(range(next_slot))  # free + cached == all


def test_the_root_of_a_namespace_goes_with_its_last_node() -> None:
    tree = RadixTree()
    for i in range(50):
        tree.peek(ids(1, 2), f"peeked {i}")
        match = tree.match(ids(1, 2), f"locked {i}")
        tree.lock(match.node)
        inserted = tree.insert(ids(1, 2), [Extent(2 * i, 2 * i + 2)], owned_from=0, namespace=f"locked {i}")
        tree.lock(inserted.node)
        tree.unlock(match.node)
        tree.unlock(inserted.node)
    assert len(tree._roots) == 50
    tree.evict(40)
    assert len(tree._roots) == 30
    tree.evict(1000)
    assert tree._roots == {}
    tree.check_integrity()
