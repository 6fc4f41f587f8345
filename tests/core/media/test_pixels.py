"""Pictures of every mode as upright RGB, by bands: the pixels that Pillow makes of a whole picture, in less memory."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from graftlm.core.errors import ConfigError
from graftlm.core.media import pixels
from graftlm.core.media.limits import MediaLimits
from graftlm.core.media.loading import decode_image, load_image

SIZE = (90, 61)
COLOURS = np.random.default_rng(3).integers(0, 256, (SIZE[1], SIZE[0], 4), np.uint8)
PALETTED = Image.fromarray(COLOURS[:, :, :3]).quantize(50)
PICTURES: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
    "RGB": (Image.fromarray(COLOURS[:, :, :3]), "PNG", {}),
    "RGB without a colour": (Image.fromarray(COLOURS[:, :, :3]), "PNG", {"transparency": (3, 4, 5)}),
    "RGBA": (Image.fromarray(COLOURS), "PNG", {}),
    "grey": (Image.fromarray(COLOURS[:, :, 0]), "PNG", {}),
    "grey and alpha": (Image.fromarray(COLOURS).convert("LA"), "PNG", {}),
    "bits": (Image.fromarray(COLOURS[:, :, 0]).convert("1"), "PNG", {}),
    "palette": (PALETTED, "PNG", {}),
    "palette and alpha": (PALETTED, "PNG", {"transparency": bytes(range(50))}),
    "JPEG": (Image.fromarray(COLOURS[:, :, :3]), "JPEG", {}),
    "grey JPEG": (Image.fromarray(COLOURS[:, :, 0]), "JPEG", {}),
    "CMYK": (Image.fromarray(COLOURS[:, :, :3]).convert("CMYK"), "JPEG", {}),
    "WebP": (Image.fromarray(COLOURS), "WEBP", {"lossless": True}),
    "GIF": (PALETTED, "GIF", {}),
}


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("own_memory", [False, True])
@pytest.mark.parametrize("name", PICTURES)
def test_bands_have_the_pixels_of_the_whole(name: str, own_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "LARGE_PIXELS", 1 if own_memory else 1 << 30)
    monkeypatch.setattr(pixels, "BAND_PIXELS", 8 * SIZE[0])
    picture, kind, options = PICTURES[name]
    for orientation in range(1, 9) if kind != "GIF" else (1,):
        given = {**options, "exif": turned(orientation)} if kind != "GIF" else options
        data = encoded(picture, kind, **given)
        found = decode_image(data).picture
        whole = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = (whole.convert("RGBA") if whole.mode == "P" else whole).convert("RGB")
        assert found.mode == "RGB" and found.size == expected.size
        assert np.array_equal(np.asarray(found), np.asarray(expected))
        assert type(found) is Image.Image  # without the decoder
    before = picture.mode, np.asarray(picture).copy()
    load_image(picture)
    assert picture.mode == before[0] and np.array_equal(np.asarray(picture), before[1])


def test_sixteen_bits_are_rounded_to_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "LARGE_PIXELS", 1)
    values = np.random.default_rng(4).integers(0, 65536, (61, 90), np.uint16)
    found = decode_image(encoded(Image.fromarray(values), "PNG", exif=turned(6))).picture
    expected = np.rot90(np.round(values / 257), -1)
    assert all(np.array_equal(np.asarray(found)[:, :, i], expected) for i in range(3))


def memory_mb(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="memory of parts is given back on Linux")
def test_a_large_turned_picture_used_to_be_in_memory_twice() -> None:
    data = encoded(Image.new("RGBA", (4000, 3000), (9, 8, 7, 6)), "PNG", compress_level=1, exif=turned(6))
    decode_image(encoded(Image.new("RGB", (8, 8)), "PNG"))
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = memory_mb("VmRSS")
    picture = decode_image(data).picture
    assert memory_mb("VmHWM") - before_mb < 1.5 * 4 * 12e6 / (1 << 20)
    assert picture.getpixel((0, 0)) == (9, 8, 7) and picture.size == (3000, 4000)


def test_decoders_that_hold_several_copies_take_smaller_pictures() -> None:
    limits = MediaLimits(max_image_pixels=10_000)
    picture = Image.new("RGB", (95, 100))
    for kind, options in (("WEBP", {}), ("JPEG", {"progressive": True, "subsampling": 0})):
        with pytest.raises(ConfigError, match=r"of 95x100, which takes 0 MB to decode; .*raise max_image_pixels"):
            decode_image(encoded(picture, kind, **options), limits)
        assert decode_image(encoded(picture.crop((0, 0, 37, 100)), kind, **options), limits).picture.size == (37, 100)
    for kind, options in (("PNG", {}), ("JPEG", {})):
        assert decode_image(encoded(picture, kind, **options), limits).picture.size == (95, 100)
