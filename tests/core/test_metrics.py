"""Steps by the number of their tokens."""

from __future__ import annotations

import sys
import types

import pytest

from graftlm.adapters.server.metrics import device_memory
from graftlm.core.metrics import STEP_BOUNDS, Counters, StepTokens


def test_steps_are_counted_by_their_tokens_and_add_up_over_replicas() -> None:
    one = StepTokens().ran(1, 4).ran(9, 1)
    other = StepTokens().ran(20_000, 2)
    both = one + other
    assert dict(zip(STEP_BOUNDS, both, strict=False)) == dict.fromkeys(STEP_BOUNDS, 0) | {1: 4, 16: 1}
    assert both[-2:] == (2, 4 + 9 + 40_000)
    counters = Counters(step_tokens=both)
    counters.reset()
    assert sum(counters.step_tokens) == 0


def test_the_memory_of_gpus_in_use_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_reserved=lambda index: index,
        mem_get_info=lambda index: (3, 10),
        get_device_name=lambda index: "H200",
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert device_memory() == [("cuda:1 H200", 7, 10)]
    monkeypatch.setattr(cuda, "is_initialized", lambda: False)
    assert device_memory() == []
