from __future__ import annotations

import numpy as np
import pytest
import torch

from graftlm.kernels.recurrent import state_pool
from graftlm.kernels.recurrent.state_pool import StatePool, StateShape, slot_bytes

LAYERS = [
    (StateShape((4, 3), torch.float16), StateShape((2, 5, 5), torch.float32)),
    (StateShape((4, 3), torch.float16),),
]


def test_a_slot_holds_every_layer_with_aligned_parts() -> None:
    pool = StatePool(LAYERS, 3)
    assert [[tuple(t.shape) for t in tensors] for tensors in pool.layers] == [[(3, 4, 3), (3, 2, 5, 5)], [(3, 4, 3)]]
    assert slot_bytes(LAYERS) == 2 * 32 * 2 + 64 * 4


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_copies_of_slots_read_before_they_write(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(state_pool, "COPY_BYTES", at_once)
    pool = StatePool(LAYERS, 4)
    for tensors in pool.layers:
        for tensor in tensors:
            for slot in range(4):
                tensor[slot] = slot
    pool.copy(np.array([[1, 2], [2, 1], [3, 0]]))
    for tensors in pool.layers:
        for tensor in tensors:
            assert [float(tensor[slot].mean()) for slot in range(4)] == [0, 2, 1, 0]
