from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from graftlm.core.kv.tiers.block_index import BLOCK_TOKENS, BlockIndex, Entry, extend_keys, first_key

ROOT = first_key("")


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Return `count` tokens of each value."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


def save(index: BlockIndex, tokens: np.ndarray) -> list[Entry | None]:
    keys = [ROOT]
    extend_keys(keys, tokens, len(tokens) // BLOCK_TOKENS)
    added = []
    for block in range(-(-len(tokens) // BLOCK_TOKENS)):
        data = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes()
        if index.covers(keys[block], data) is None:
            added.append(index.add(keys[block], data))
    return added


def found(index: BlockIndex, tokens: np.ndarray) -> int:
    return sum(one.num_tokens for one in index.longest([ROOT], tokens, 0))


def test_a_block_is_of_use_up_to_the_token_that_differs() -> None:
    index = BlockIndex(8)
    save(index, ids((1, 64), (2, 40)))
    assert found(index, ids((1, 64), (2, 40), (3, 9))) == 104
    assert found(index, ids((1, 64), (2, 7), (3, 60))) == 71
    assert found(index, ids((1, 30), (3, 60))) == 30
    assert found(index, ids((3, 60))) == 0


def test_the_same_block_after_another_prefix_is_another_block() -> None:
    index = BlockIndex(8)
    save(index, ids((1, 64), (2, 64)))
    assert found(index, ids((9, 64), (2, 64))) == 0


def test_namespaces_and_contexts_have_keys_of_their_own() -> None:
    assert len({first_key(""), first_key("a"), first_key("b"), first_key("", b"bf16"), first_key("a", b"bf16")}) == 5


def test_a_longer_block_replaces_its_beginning() -> None:
    index = BlockIndex(8)
    save(index, ids((1, 10)))
    save(index, ids((1, 50)))
    assert (len(index), index.num_tokens) == (1, 50)
    assert save(index, ids((1, 20))) == []


def test_the_least_recently_used_block_makes_room_unless_it_is_read() -> None:
    index = BlockIndex(2)
    first, second = save(index, ids((1, 10))) + save(index, ids((2, 10)))
    assert first is not None
    first.readers = 1
    save(index, ids((3, 10)))
    assert [found(index, ids((value, 10))) for value in (1, 2, 3)] == [10, 0, 10]
    first.readers = 0
    save(index, ids((4, 10)))
    assert [found(index, ids((value, 10))) for value in (1, 3, 4)] == [0, 10, 10]
    assert index.num_dropped == 2


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from([(1, 64), (2, 64), (1, 20), (3, 33)]), min_size=1, max_size=4), max_size=12))
def test_what_is_found_was_saved_and_rows_are_owned_once(prompts: list[list[tuple[int, int]]]) -> None:
    index, saved = BlockIndex(5), []
    for parts in prompts:
        tokens = ids(*parts)
        longest = max((_common(tokens, one) for one in saved), default=0)
        assert found(index, tokens) <= longest
        save(index, tokens)
        saved.append(tokens)
        index.check_integrity()


def _common(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    return int(np.cumprod(a[:size] == b[:size]).sum())
