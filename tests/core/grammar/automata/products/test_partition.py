"""States in groups of those that go on alike: with machine code as without, and as rounds over all states find them."""

from __future__ import annotations

import numpy as np
import pytest

from graftlm.core.grammar.automata import jit
from graftlm.core.grammar.automata.products import partition as module
from graftlm.core.grammar.automata.products.byte_table import ByteTable
from graftlm.core.grammar.automata.products.partition import partition
from tests.core.grammar.automata.products.test_byte_table import groups_by_rounds


@pytest.mark.parametrize("seed", range(12))
def test_long_chains_and_rings_are_told_apart_by_where_they_end(seed: int) -> None:
    jit.wait()
    rng, states = np.random.default_rng(seed), np.arange(150)
    ring = (states + 1) % 150 if seed % 2 else np.minimum(states + 1, 149)
    anywhere = rng.integers(0, 150, 150)
    targets = np.stack([np.where(rng.random(150) < 0.05, anywhere, ring) for _ in range(3)], axis=1).astype(np.int32)
    accepting = states % int(rng.integers(2, 40)) == 0
    found = partition(targets, accepting, 150)
    assert found is not None
    num_groups = groups_by_rounds(ByteTable(np.zeros(256, np.int64), targets, accepting))
    assert len(set(found.tolist())) == num_groups
    assert partition(targets, accepting, num_groups - 1) is None
    if module._refine.machine_code is not None:
        groups = accepting.astype(np.int32)
        with np.errstate(over="ignore"):
            assert module._refine.python(targets, groups, 150) == num_groups
        assert groups.tolist() == found.tolist()
