"""Pixels that stay bytes until the device spreads them: the values are those of the model's own processor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graftlm as gl
from graftlm.core.chat.messages import ImagePart
from graftlm.core.media.hf_processor import HfProcessor
from graftlm.core.media.items import spread
from graftlm.testing.random_vision import random_picture, random_vision_model


def test_each_color_has_a_table_of_its_own() -> None:
    pixels = torch.tensor([[0, 255, 7, 7, 255, 0]], dtype=torch.uint8)
    levels = torch.arange(768, dtype=torch.float32).view(3, 256)
    assert spread(pixels, levels).tolist() == [[0.0, 255.0, 263.0, 263.0, 767.0, 512.0]]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_bytes_become_the_values_of_the_processor(family: str) -> None:
    pytest.importorskip("torchvision")
    model, processor = random_vision_model(family)
    own = HfProcessor(processor, {})
    assert own.levels is not None
    for seed, (width, height) in enumerate([(80, 60), (300, 200), (33, 190)]):
        picture = random_picture(seed, width, height)
        found = own.image(picture).inputs["pixel_values"]
        assert found.dtype == torch.uint8
        expected = processor.image_processor(images=[picture], return_tensors="pt")["pixel_values"]
        assert torch.equal(spread(found, own.levels), expected)
    with gl.Runtime(model, tokenizer=processor) as runtime:
        media: Any = runtime.load().tokenizer.media
        item = media.item(ImagePart(random_picture(3)))
        assert item.inputs["pixel_values"].dtype == torch.uint8
        assert item.tensors()["pixel_values"].dtype == torch.float32 and runtime.stats().no_images == ""


def test_a_video_of_one_frame_is_refused_where_the_processor_takes_two() -> None:
    pytest.importorskip("torchvision")
    model, processor = random_vision_model("qwen3_vl")
    asked = [{"role": "user", "content": [{"type": "video", "video": [random_picture()]}]}]
    with gl.Runtime(model, tokenizer=processor) as runtime, pytest.raises(gl.ConfigError, match="1 frame of 80 x 60"):
        runtime.generate(asked, max_tokens=1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_patches_are_those_of_the_processor(family: str) -> None:
    pytest.importorskip("torchvision")
    _, processor = random_vision_model(family)
    own = HfProcessor(processor, {})
    assert own._makes_patches
    for seed, (width, height) in enumerate([(80, 60), (300, 200), (33, 190)]):
        picture = random_picture(seed, width, height)
        found, expected = own.image(picture), own._image(picture, own.hf.image_processor)
        assert found.text == expected.text and found.ids.tolist() == expected.ids.tolist()
        assert all(torch.equal(found.inputs[name], value) for name, value in expected.inputs.items())


def test_a_processor_whose_values_are_no_function_of_the_byte_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    _, processor = random_vision_model("qwen2_vl")
    kind = type(processor.image_processor)
    plain = kind.rescale_and_normalize

    def uneven(self: Any, images: Any, *args: Any) -> Any:
        found = plain(self, images, *args)
        return found + torch.arange(found.shape[-1]) if found.is_floating_point() else found

    monkeypatch.setattr(kind, "rescale_and_normalize", uneven)
    assert HfProcessor(processor, {}).levels is None
