from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from graftlm.core.fusion.rotary import RotaryPatch


def original(q: Any, k: Any, cos: Any, sin: Any, *rest: Any) -> str:
    return "the file's own"


@pytest.fixture
def source() -> ModuleType:
    made = ModuleType("modeling_fake")
    made.apply_rotary_pos_emb = original  # type: ignore[attr-defined]
    return made


def turn(source: Any) -> Any:
    heads, angle = torch.ones(1, 2, 3, 4), torch.ones(1, 3, 4)
    return source.apply_rotary_pos_emb(heads, heads, angle, angle)


@pytest.mark.parametrize("first_out", [0, 1])
def test_closing_models_in_any_order_used_to_leave_a_wrapper_behind(source: Any, first_out: int) -> None:
    patches = []
    for _ in range(2):
        patch = RotaryPatch.of(source, lambda q, k, cos, sin: (q + 1, k + 1))
        assert patch is not None
        patch.add("cpu")
        patches.append(patch)
    assert patches[0] is patches[1]
    patches.pop(first_out).remove("cpu")
    q, _ = turn(source)
    assert q.shape == (1, 2, 3, 4) and q[0, 0, 0, 0] == 2
    patches.pop().remove("cpu")
    assert source.apply_rotary_pos_emb is original


def test_other_devices_and_shapes_go_through_the_files_own(source: Any) -> None:
    patch = RotaryPatch.of(source, lambda q, k, cos, sin: (q, k))
    assert patch is not None
    patch.add("cuda")
    assert turn(source) == "the file's own"
    patch.add("cpu")
    heads, angle = torch.ones(2, 2, 3, 4), torch.ones(2, 3, 4)
    assert source.apply_rotary_pos_emb(heads, heads, angle, angle) == "the file's own"


def test_a_file_without_a_rotary_embedding_gets_no_patch() -> None:
    assert RotaryPatch.of(ModuleType("modeling_fake"), lambda *heads: heads) is None
