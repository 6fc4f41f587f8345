from __future__ import annotations

import numpy as np
import pytest

from graftlm.core.errors import EngineError
from graftlm.core.kv.radix import Node, RadixTree
from graftlm.core.kv.states import MOVING, StateSlots
from graftlm.kernels.wire_plan import RESERVED, ZERO, Extent

A, B, C = RESERVED, RESERVED + 1, RESERVED + 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def node_of(*tokens: int) -> Node:
    return RadixTree().insert(ids(*tokens), [Extent(0, len(tokens))], 0).node


def with_checkpoint(states: StateSlots, node: Node) -> int:
    slot = states.take()
    assert slot is not None
    states.copy(slot, None)
    states.count(slot, node.depth)
    states.attach(node, slot)
    return slot


def test_the_least_recently_used_checkpoint_that_is_not_pinned_makes_room() -> None:
    pinned: set[Node] = set()
    states = StateSlots(3, pinned)
    first, second, third = (node_of(token) for token in (1, 2, 3))
    assert [with_checkpoint(states, node) for node in (first, second, third)] == [A, B, C]
    states.touch(first)
    pinned.add(second)
    assert states.take() == C
    assert (first.state, second.state, third.state) == (A, B, None)
    assert states.take() == A
    assert states.take() is None
    assert not states.available


def test_a_copy_of_a_state_that_is_itself_to_be_copied_reads_the_first_source() -> None:
    states = StateSlots(3, ())
    a, b, c = states.take(), states.take(), states.take()
    states.copy(a, None)
    states.count(a, 7)
    assert states.send().tolist() == [[A, ZERO]]
    states.copy(b, a)
    states.copy(c, b)
    assert states.send().tolist() == [[B, A], [C, A]]
    assert states.consumed(c) == 7


def test_checkpoints_written_by_a_failed_step_are_dropped() -> None:
    states = StateSlots(2, ())
    node = node_of(1)
    slot = with_checkpoint(states, node)
    states.send()
    states.reject()
    assert node.state is None
    assert states.consumed(slot) == MOVING
    assert states.num_free == 2


def test_a_state_of_another_token_than_its_nodes_last_used_to_give_wrong_logits_unnoticed() -> None:
    states = StateSlots(2, ())
    node = node_of(1, 2, 3)
    states.count(with_checkpoint(states, node), 2)
    with pytest.raises(EngineError, match="after 2 tokens was kept at token 3"):
        states.check_new()


def test_a_match_ends_at_the_last_node_with_a_state() -> None:
    tree = RadixTree()
    tree.insert(ids(1, 2, 3, 4), [Extent(0, 4)], 0)
    upper = tree.insert(ids(1, 2), [Extent(0, 2)], 2).node
    assert tree.match(ids(1, 2, 3, 4), with_state=True).length == 0
    upper.state = A
    match = tree.match(ids(1, 2, 3, 4), with_state=True)
    assert (match.node, match.length, match.extents) == (upper, 2, [Extent(0, 2)])
    assert tree.find_state(ids(1, 2, 3)).length == 2
    assert tree.peek(ids(1, 2, 3)).length == 3


def test_cutting_the_tail_of_a_node_frees_its_state() -> None:
    states = StateSlots(1, ())
    tree = RadixTree(forget=states.forget)
    node = tree.insert(ids(1, 2, 3), [Extent(0, 3)], 0).node
    with_checkpoint(states, node)
    assert tree.evict(1) == [Extent(2, 3)]
    assert (node.state, states.num_free) == (None, 1)


def test_a_split_leaves_the_state_at_the_last_token() -> None:
    tree = RadixTree()
    node = tree.insert(ids(1, 2, 3), [Extent(0, 3)], 0).node
    node.state = A
    upper = tree.match(ids(1, 2)).node
    assert (upper.state, node.state, node.depth) == (None, A, 3)
