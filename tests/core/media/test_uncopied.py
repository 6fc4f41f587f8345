"""Large pictures are processed without copies of all their pixels, to the same inputs."""

from __future__ import annotations

import importlib.util
import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graftlm.core.media import hf_processor
from graftlm.core.media.hf_processor import HfProcessor, Processed
from graftlm.core.media.loading import load_image
from graftlm.testing.random_vision import random_picture, random_vision_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="processors compute with torchvision"
)


def processor(family: str) -> HfProcessor:
    return HfProcessor(random_vision_model(family)[1], {})


def equal(one: Processed, other: Processed) -> bool:
    arrays = [(one.ids, other.ids), *((x, other.inputs[name]) for name, x in one.inputs.items())]
    return one.text == other.text and all(np.array_equal(a, b) for a, b in arrays)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "llava_next", "llava_onevision", "idefics3", "gemma3"])
@pytest.mark.parametrize("size", [(320, 90), (90, 320), (28, 28)])
def test_inputs_are_the_same(family: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    hf, picture = processor(family), random_picture(3, *size)
    expected = hf.image(picture)
    monkeypatch.setattr(hf_processor, "LARGE_PIXELS", 0)
    assert hf._uncopied is not hf.hf.image_processor
    assert equal(hf.image(picture), expected)
    if hf.several_differ:
        assert equal(hf.image(picture, among_several=True), processor(family).image(picture, among_several=True))


def test_no_copy_of_all_pixels_is_made() -> None:
    hf, picture = processor("qwen2_5_vl"), Image.new("RGB", (2100, 2100))
    hf.image(picture)  # has tried small ones
    tracemalloc.start()
    try:
        hf.image(picture)
        assert tracemalloc.get_traced_memory()[1] < 2100 * 2100  # an array has three bytes a pixel
    finally:
        tracemalloc.stop()


def test_a_processor_that_makes_something_else_of_it_gets_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    hf, picture = processor("llava"), random_picture(3, 320, 90)
    expected = hf.image(picture)
    kind: Any = type(hf.hf.image_processor)
    center_crop = kind.center_crop

    def shifted(self: Any, image: Any, size: Any, **options: Any) -> Any:
        found = center_crop(self, image, size, **options)
        return found if type(self) is kind else 1 - found

    monkeypatch.setattr(kind, "center_crop", shifted)
    monkeypatch.setattr(hf_processor, "LARGE_PIXELS", 0)
    assert equal(hf.image(picture), expected)
    assert hf._uncopied is hf.hf.image_processor


def test_16_bits_become_8_some_rows_at_a_time() -> None:
    values = np.random.default_rng(0).integers(0, 65536, (700, 900), np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    found = np.asarray(load_image(file.getvalue()).picture)
    assert np.array_equal(found[..., 1], np.rint(values / 257).astype(np.uint8))
    narrow = Image.fromarray(np.random.default_rng(1).integers(0, 256, (700, 900), np.int32))
    assert np.array_equal(np.asarray(load_image(narrow).picture)[..., 2], np.asarray(narrow))
