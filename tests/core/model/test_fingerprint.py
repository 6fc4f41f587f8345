"""What a cache of answers is keyed by: all that may change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.model.fingerprint import model_fingerprint
from tests.models import tiny_model


def test_equal_weights_and_options_have_one_fingerprint() -> None:
    options = {"max_batch": 4, "cache": CacheConfig(max_tokens=512)}  # how much at once changes no answer
    one, other = (
        model_fingerprint(tiny_model(), EngineConfig()),
        model_fingerprint(tiny_model(), EngineConfig(**options)),
    )
    assert one == other and len(one) == 16


@pytest.mark.parametrize(
    "options",
    [
        {"strict": True},
        {"dtype": "bfloat16"},
        {"cache": CacheConfig(dtype="fp8")},
        {"cache": CacheConfig(dtype="model")},
    ],
)
def test_another_precision_has_another_one(options: dict[str, Any]) -> None:
    assert model_fingerprint(tiny_model(), EngineConfig(**options)) != model_fingerprint(tiny_model(), EngineConfig())


def test_another_weight_has_another_one() -> None:
    model = tiny_model()
    before = model_fingerprint(model, EngineConfig())
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    assert model_fingerprint(model, EngineConfig()) != before
