"""The router: longest known prefix, within a bound on the load."""

from __future__ import annotations

import numpy as np

from graftlm.core.cluster.router import Router


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """A prompt of runs of one token each, as (token, length)."""
    return np.concatenate([np.full(length, token, np.int32) for token, length in parts])


def router(num: int = 2, slack: int = 1000) -> Router:
    made = Router(slack)
    for number in range(num):
        made.add(number)
    return made


def send(made: Router, prompt: np.ndarray, namespace: str = "") -> int:
    number = made.choose(prompt, namespace)
    made.sent(number, prompt, namespace)
    return number


def test_unknown_prompts_go_to_the_least_busy_replica() -> None:
    made = router()
    assert [send(made, ids((token, 100))) for token in range(4)] == [0, 1, 0, 1]


def test_a_known_prefix_goes_where_it_is_cached() -> None:
    made = router()
    send(made, ids((7, 64), (1, 10)))
    send(made, ids((8, 128)))
    assert send(made, ids((8, 64), (2, 300))) == 1
    assert send(made, ids((7, 64), (2, 300))) == 0


def test_the_longer_of_two_known_prefixes_wins() -> None:
    made = router()
    made.sent(0, ids((7, 64)))
    made.sent(1, ids((7, 128)))
    assert made.choose(ids((7, 200))) == 1


def test_a_prefix_spreads_where_its_replica_is_too_busy() -> None:
    made = router(slack=100)
    head = ids((7, 64))
    numbers = [send(made, np.concatenate([head, ids((token, 36))])) for token in range(4)]
    assert numbers == [0, 0, 1, 1]


def test_namespaces_share_nothing() -> None:
    made = router()
    send(made, ids((7, 64)), "mine")
    assert send(made, ids((7, 64)), "yours") == 1


def test_a_lost_replica_gets_nothing_and_its_prefixes_are_unknown() -> None:
    made = router()
    send(made, ids((7, 64)))
    made.forget(0)
    assert send(made, ids((7, 64))) == 1
    made.ended(0, 64)
    made.add(2)
    assert made.load == {1: 64, 2: 0}


def test_only_so_many_blocks_are_remembered() -> None:
    made = Router(slack=10_000, capacity=2)
    made.add(0)
    made.add(1)
    made.sent(1, ids((7, 64)))
    made.sent(0, ids((8, 128)))
    made.ended(0, 128)
    assert made.choose(ids((7, 64))) == 0  # forgotten, and replica 0 is the less busy one
