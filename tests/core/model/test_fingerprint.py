"""What a cache of answers is keyed by: all that may change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

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


def folder(path: Path, **changed: torch.Tensor) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    tensors = {f"layer{i}": torch.full((1 << 20,), float(i)) for i in range(4)} | {"layer1_norm": torch.ones(64)}
    save_file(tensors | changed, path / "model.safetensors")
    return path


def test_fine_tunes_that_differ_in_one_tensor_used_to_collide(tmp_path: Path) -> None:
    norm = torch.ones(64)
    norm[3] = 2
    made = [
        folder(tmp_path / "base"),
        folder(tmp_path / "norm", layer1_norm=norm),
        folder(tmp_path / "layer", layer2=torch.full((1 << 20,), 2.5)),
        folder(tmp_path / "shape", layer2=torch.full((1 << 10, 1 << 10), 2.0)),
    ]
    assert len({model_fingerprint(path, EngineConfig()) for path in made}) == 4
    again = folder(tmp_path / "again")
    assert model_fingerprint(again, EngineConfig()) == model_fingerprint(made[0], EngineConfig())


def test_a_file_that_is_no_safetensors_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * (2 << 20))
    assert len(model_fingerprint(tmp_path, EngineConfig())) == 16
