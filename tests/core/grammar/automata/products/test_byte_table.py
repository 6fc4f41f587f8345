"""Automata as arrays, with as few states as their language needs."""

from __future__ import annotations

import numpy as np
import pytest

from graftlm.core.grammar.automata.products.byte_table import ByteTable


def groups_by_rounds(table: ByteTable) -> int:
    """How many groups of states go on alike: all states are looked at in each round."""
    groups, num_groups = [int(ends) for ends in table.accepting], 0
    while len(set(groups)) != num_groups:
        num_groups = len(set(groups))
        ways = [
            (groups[state], *[groups[target] for target in row]) for state, row in enumerate(table.targets.tolist())
        ]
        numbers = {way: i for i, way in enumerate(dict.fromkeys(ways))}
        groups = [numbers[way] for way in ways]
    return num_groups


@pytest.mark.parametrize("seed", range(60))
def test_states_are_as_many_as_the_ways_to_go_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_states, num_classes = int(rng.integers(3, 50)), int(rng.integers(1, 4))
    shape = (num_states, num_classes)
    after = np.arange(num_states)[:, None] + rng.integers(0, 3, shape)  # chains, or any state after any other
    targets = np.minimum(after, num_states - 1) if seed % 2 else rng.integers(0, num_states, shape)
    accepting = rng.random(num_states) < 0.2
    targets[0], accepting[0] = 0, False
    classes = rng.integers(0, num_classes, 256)
    table = ByteTable(classes, targets.astype(np.int32), accepting)
    small, num_groups = table.minimal(100), groups_by_rounds(table)
    texts = [rng.integers(0, 256, int(length)).astype(np.uint8).tobytes() for length in rng.integers(0, 60, 80)]
    assert [small.accepts(text) for text in texts] == [table.accepts(text) for text in texts]
    if small is not table:  # no text is accepted by itself
        assert len(small.targets) == num_groups
        assert table.minimal(num_groups - 1) is table and len(table.minimal(num_groups).targets) == num_groups
