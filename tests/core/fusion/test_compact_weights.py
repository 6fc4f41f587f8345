"""Which modules hold their weights in 12 bits too; tests/gpu/test_compact_weights.py runs them on a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.execution.routing import has_experts
from graftlm.core.fusion import compact_weights
from graftlm.core.fusion.compact_weights import choose_compact
from graftlm.kernels.bits12.weight import Bits12Weight
from graftlm.kernels.weight import held_as, weight_of
from tests.models import tiny_model

MIB = 1 << 20


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight suits, as bfloat16 does on a Hopper GPU, and 100 MiB of memory are free."""
    monkeypatch.setattr(Bits12Weight, "suits", staticmethod(lambda values: True))
    monkeypatch.setattr(compact_weights, "can_compact_experts", lambda weights: True)
    monkeypatch.setattr(compact_weights, "free_bytes", lambda device: 100 * MIB)


def loaded_of(kind: str = "llama") -> Any:
    model = tiny_model(kind)
    return SimpleNamespace(model=model, name="tiny", dtype=torch.bfloat16, device=torch.device("cpu"))


def held(loaded: Any) -> list[bool]:
    """Which of the linear layers, and whether the experts, are held in 12 bits too."""
    modules = [m for m in loaded.model.modules() if weight_of(m) is not None or has_experts(m)]
    return [held_as(m) is Bits12Weight for m in modules]


def test_all_linear_layers_and_experts_are_held_where_memory_is_free() -> None:
    for kind in ("llama", "mixtral"):
        loaded = loaded_of(kind)
        choose_compact(loaded, EngineConfig())
        assert all(held(loaded))
        choose_compact(loaded, EngineConfig(compact_weights=False))  # a model that another runtime marked
        assert not any(held(loaded))


def test_strict_mode_leaves_experts_as_they_are() -> None:
    loaded = loaded_of("mixtral")
    choose_compact(loaded, EngineConfig(strict=True))
    experts = [held_as(m) is Bits12Weight for m in loaded.model.modules() if has_experts(m)]
    assert experts and not any(experts) and any(held(loaded))


def test_weights_that_take_too_much_of_the_free_memory_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_weights, "free_bytes", lambda device: 1000)
    loaded = loaded_of()
    choose_compact(loaded, EngineConfig())
    assert not any(held(loaded))
    with pytest.raises(ConfigError, match=r"compact weights take .* beside the weights, 0\.0 MB are free on cpu"):
        choose_compact(loaded, EngineConfig(compact_weights=True))


def test_asking_for_what_no_weight_can_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bits12Weight, "suits", staticmethod(lambda values: False))
    with pytest.raises(ConfigError, match="compact_weights is True, but there are none for tiny in bfloat16 on cpu"):
        choose_compact(loaded_of(), EngineConfig(compact_weights=True))
