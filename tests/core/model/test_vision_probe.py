"""The self-test of pictures accepts what rounding explains, in half precision, and refuses what it does not."""

from __future__ import annotations

import pytest
import torch

import graftlm as gl
from graftlm.core.execution.vision import Vision
from graftlm.core.model.vision_probe import PictureReference
from graftlm.testing.random_vision import random_vision_model


def test_the_limit_grows_with_the_models_own_rounding_up_to_a_bound() -> None:
    shallow, deep, broken = (PictureReference(rounding=rounding) for rounding in (0.01, 0.07, 5.0))
    assert shallow.limit(torch.bfloat16) < deep.limit(torch.bfloat16) == pytest.approx(0.14)
    assert broken.limit(torch.bfloat16) == 0.2
    assert shallow.limit(torch.float32) < 0.03  # a float32 reference has no rounding to measure


def test_rounding_is_measured_and_the_attention_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = random_vision_model("llava")
    before = model.config.get_text_config()._attn_implementation
    seen: list[PictureReference] = []
    own = PictureReference.limit
    monkeypatch.setattr(
        PictureReference, "limit", lambda self, dtype: seen.append(self) or own(self, dtype)
    )  # called by the self-test
    with gl.Runtime(model, tokenizer=processor, device="cpu", dtype="bfloat16", quiet=True) as runtime:
        runtime.load()
        assert runtime.stats().no_images == ""
    assert 1e-3 < seen[0].rounding < 5e-2
    assert model.config.get_text_config()._attn_implementation == before


def test_wrong_embeddings_are_refused_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Vision.encode

    def turned(self: Vision, items: list[object]) -> list[object]:
        found = encode(self, items)
        for features in found:
            for layer in features.layers:
                layer.copy_(layer.flip(0))
        return found

    monkeypatch.setattr(Vision, "encode", turned)
    model, processor = random_vision_model("llava")
    with gl.Runtime(model, tokenizer=processor, device="cpu", dtype="bfloat16", quiet=True) as runtime:
        runtime.load()
        assert "differs from the model's own forward" in runtime.stats().no_images
