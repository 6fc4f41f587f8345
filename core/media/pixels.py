"""Pictures of every mode as upright RGB, a band of rows at a time: a large one is in memory once.

Pillow decodes a picture whole, with four bytes a pixel, and a conversion or a turn makes a second one. A large picture
is decoded into memory of its own here, whose pages go back to the system as the bands are read.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

BAND_PIXELS = 1 << 16
"""Pixels of a picture that are copied or converted at once: larger pieces of memory come from the system each time."""

LARGE_PIXELS = 1 << 22
"""Pixels of a picture whose copies are avoided, and whose memory goes back to the system at once."""

_PIXEL_BYTES = {"RGB": 4, "RGBA": 4, "RGBX": 4, "LA": 4, "CMYK": 4, "I": 4, "I;16": 2, "I;16B": 2}
_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE",
    6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
_LAST_FIRST = (3, 4, 6, 7)
"""Orientations whose first rows become the last rows or columns."""


def import_pillow() -> Any:
    """Return Pillow's module `PIL.Image`. Raises ConfigError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("pictures are read with Pillow, which is not installed; pip install pillow") from error
    return Image


def upright_rgb(picture: ImageFile) -> Image:
    """Decode a file that was opened, and return it as RGB, turned upright by its EXIF orientation.

    The values are those of `as_rgb`. The file's decoder, which may hold the picture as well, is not kept.
    """
    source = _mapped(picture.mode, picture.size) if picture.format in ("PNG", "JPEG") else None
    if source is not None:
        picture.im = source.pixels
    picture.load()
    orientation = picture.getexif().get(_ORIENTATION, 1)
    if picture.mode == "RGB" and orientation not in _TURNS:
        return picture._new(picture.im)
    return _by_bands(picture, orientation, source)


def as_rgb(picture: Image) -> Image:
    """Return a picture of any mode as RGB, as transformers does; of 16 bits, the upper eight. It stays as it is."""
    if picture.mode == "RGB":
        picture.load()
        return picture
    return _by_bands(picture, 1, None)


def pixels_of(picture: Image) -> NDArray[np.uint8]:
    """Return the pixels of a picture of mode RGB, [height, width, 3], in a quarter of numpy's time."""
    width, height = picture.size
    found = np.empty((height, width, 3), np.uint8)
    for top, band in bands_of(picture):
        found[top : top + band.height] = np.frombuffer(band.tobytes(), np.uint8).reshape(band.height, width, 3)
    return found


def bands_of(picture: Image) -> Iterator[tuple[int, Image]]:
    """Return a picture as bands of rows, each with its first row."""
    width, height = picture.size
    step = max(1, BAND_PIXELS // max(width, 1))
    for top in range(0, height, step):
        yield top, picture.crop((0, top, width, min(top + step, height)))


class _Mapped(NamedTuple):
    """Pixels in memory of their own, which is taken as they are written. memory: row after row"""

    pixels: Any
    memory: mmap.mmap


def _mapped(mode: str, size: tuple[int, int]) -> _Mapped | None:
    """Return memory for the pixels of a large picture; None where Pillow's own memory does."""
    pixel_bytes = _PIXEL_BYTES.get(mode, 0)
    map_buffer = getattr(import_pillow().core, "map_buffer", None)  # of Image.frombuffer; it takes these modes as well
    if sys.platform != "linux" or size[0] * size[1] < LARGE_PIXELS or not pixel_bytes or map_buffer is None:
        return None
    memory = mmap.mmap(-1, size[0] * size[1] * pixel_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return _Mapped(map_buffer(memory, size, "raw", 0, (mode, 0, 1)), memory)


def _by_bands(picture: Image, orientation: int, source: _Mapped | None) -> Image:
    """Convert and turn some rows at a time into a new picture. source: of the old one, given back meanwhile"""
    pillow, wide = import_pillow(), _is_wide(picture)
    width, height = picture.size
    turn, sideways = _TURNS.get(orientation), orientation in (5, 6, 7, 8)
    size = (height, width) if sideways else (width, height)
    target = _mapped("RGB", size)
    found: Image = pillow.new("RGB", size) if target is None else picture._new(target.pixels)
    given_back = 0
    for top, part in bands_of(picture):
        bottom = top + part.height
        band = _band_as_rgb(part, wide)
        if turn is not None:
            band = band.transpose(pillow.Transpose[turn])
        along = height - bottom if orientation in _LAST_FIRST else top
        found.paste(band, (along, 0) if sideways else (0, along))
        if source is not None:
            end = len(source.memory) * bottom // height // mmap.PAGESIZE * mmap.PAGESIZE
            if end > given_back:
                source.memory.madvise(mmap.MADV_DONTNEED, given_back, end - given_back)
            given_back = end
    found.info.clear()
    return found


def _is_wide(picture: Image) -> bool:
    """Whether the values of a picture of integers have 16 bits."""
    if not picture.mode.startswith("I"):
        return False
    extrema: Any = picture.getextrema()
    return picture.mode != "I" or extrema[1] > 255


def _band_as_rgb(band: Image, wide: bool) -> Image:
    if band.mode.startswith("I"):
        values = np.asarray(band)
        band = import_pillow().fromarray(narrowed(values) if wide else values.astype(np.uint8))
    elif band.mode in ("P", "RGBa", "La") or "transparency" in band.info:
        band = band.convert("RGBA")
    return band.convert("RGB")


def narrowed(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return 16-bit values as 8-bit values, rounded."""
    return ((values.clip(0, 65535).astype(np.uint32) + 128) // 257).astype(np.uint8)
