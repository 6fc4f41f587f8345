"""load_image and load_video: every kind of source, the modes of pictures, the limits, and files that are broken."""

import base64
import io
import os
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from graftlm.core.errors import ConfigError
from graftlm.core.media.loading import FORMATS, MediaLimits, decode_image, load_image, media_type
from graftlm.core.media.video import load_video

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encoded(image: Image.Image = PICTURE, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that states a size without having the pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    data, path = encoded(), tmp_path / "a picture.bin"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    sources = [
        *(data, bytearray(data), path, str(path), path.as_uri(), PICTURE, PIXELS, PIXELS.astype(np.int64)),
        *(f"data:image/jpeg;base64,{text}", f"DATA:;base64,{text[:20]}\n{text[20:].rstrip('=')}"),
        *(torch.from_numpy(PIXELS), torch.from_numpy(PIXELS).permute(2, 0, 1) / 255, PIXELS.astype(np.uint16) * 257),
    ]
    for source in sources:
        loaded = load_image(source)
        assert (np.asarray(loaded.picture) == PIXELS).all() and loaded.picture.mode == "RGB"
        assert loaded.encoded in (data, None) and loaded.mime_type == "image/png"
        assert load_image(loaded) is loaded


def test_long_base64_is_decoded_in_pieces_and_its_first_bytes_decide() -> None:
    data = encoded() + random.Random(1).randbytes(500_000)  # decoders ignore what follows a picture
    for text in (base64.encodebytes(data).decode(), base64.urlsafe_b64encode(data).decode().rstrip("=")):
        assert load_image(f"data:;base64,{text}").encoded == data
    broken = base64.b64encode(data).decode()
    with pytest.raises(ConfigError, match="broken base64"):
        load_image(f"data:;base64,{broken[:400_000]}?{broken[400_001:]}")
    with pytest.raises(ConfigError, match="600,00. bytes that are no picture"):  # before the rest, which is no base64
        load_image("data:;base64," + "A" * 400_000 + "?" * 400_000)


def test_modes_become_rgb() -> None:
    grey16 = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
    assert np.asarray(load_image(encoded(grey16)).picture)[0, :, 0].tolist() == [0, 1, 128, 255]
    assert np.asarray(load_image(grey16).picture)[0, :, 0].tolist() == [0, 1, 128, 255]
    red = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert load_image(encoded(red)).picture.getpixel((0, 0)) == (255, 0, 0)  # alpha is dropped
    palette = PICTURE.quantize(4)
    faint = encoded(palette, transparency=bytes([0, 128, 255, 255]))
    assert (np.asarray(load_image(faint).picture) == np.asarray(palette.convert("RGB"))).all()
    assert load_image(encoded(PICTURE.convert("CMYK"), "JPEG")).picture.mode == "RGB"
    for mode in ("1", "L", "LA", "P"):
        assert load_image(encoded(PICTURE.convert(mode))).picture.mode == "RGB"
    assert load_image(np.zeros((2, 3))).picture.size == (3, 2)


def test_a_photo_is_turned_upright_and_an_object_is_not() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(kind="JPEG", exif=exif.tobytes())
    assert load_image(turned).picture.size == (6, 9)
    assert load_image(Image.open(io.BytesIO(turned))).picture.size == (9, 6)


def test_every_format_with_its_type(tmp_path: Path) -> None:
    for kind, mime_type in FORMATS.items():
        data = encoded(kind=kind)
        assert media_type(data) == load_image(data).mime_type == mime_type
        assert load_image(data).picture.size == (9, 6)
    assert load_image(encoded(kind="WEBP", lossless=True)).picture.size == (9, 6)


def test_an_animation_gives_its_first_frame_and_as_a_video_all() -> None:
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (10, 90, 170, 250)]
    for kind in ("PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=500, **options)
        assert load_image(data).picture.getpixel((0, 0)) == (10, 0, 0)
        video = load_video(data, 2)
        assert video.frames[:, 0, 0, 0].tolist() == [10, 170]
        assert video.timestamps.tolist() == [0.0, 1.0] and video.num_total == 4
    listed = load_video(frames, 3)
    assert listed.indices.tolist() == [0, 1, 2] and listed.frames.shape == (3, 4, 4, 3)
    stacked = load_video(torch.tensor(np.stack([np.asarray(f) for f in frames])).permute(0, 3, 1, 2), fps=2)
    assert (stacked.frames == np.stack([np.asarray(f) for f in frames])).all() and stacked.timestamps[-1] == 1.5


LARGE = MediaLimits(max_image_pixels=100)
NO_PICTURE: dict[str, tuple[object, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello", "5 bytes that are no picture read here; send PNG, JPEG, WEBP, GIF, BMP"),
    "another format": (encoded(kind="TIFF"), "image/tiff, which is not read here"),
    "wrong magic": (b"\x89PNG\r\n\x1a\n" + encoded(kind="JPEG"), "broken PNG"),
    "header only": (encoded()[:20], "broken PNG"),
    "no frame header": (b"\xff\xd8" + b"\xff\xfe\0\2" * 5000, "broken JPEG"),
    "half": (encoded(kind="JPEG")[:-200], "broken JPEG"),
    "no rows": (png(9, 6), "broken PNG"),
    "zero": (png(0, 5), "0x5"),
    "bomb": (png(30_000, 30_000), "30000x30000, 900,000,000 pixels; the limit is 33,554,432"),
    "webp bomb": (
        b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\2\0\0\0" + b"\xfe\x3f\0" * 2 + b"ANIM",
        "16383x16383, 268,402,689 pixels",
    ),
    "scans": (encoded(kind="JPEG")[:-2] + b"\xff\xda" * 80, "81 scans; the limit is 64"),
    "no comma": ("data:image/png;base64", "without a comma"),
    "no base64": ("data:image/png;base64,????", "broken base64"),
    "url": ("https://example.com/a.png", "none is fetched; give its bytes or a path, or set media_urls=True"),
    "no file": ("/nowhere/a.png", "is no file"),
    "a name with a null": ("a\0b", "is no file"),
    "device": ("/dev/zero", "no regular file"),
    "folder": (Path("/"), "cannot be read|no regular file"),
    "kind": (3.5, "a picture is a float"),
    "shape": (np.zeros((2, 2, 2, 2)), r"\[2, 2, 2, 2\]"),
    "no pixels": (np.zeros((0, 4), np.uint8), "4x0"),
    "range": (np.full((2, 2), 200.0), "200.0; they must lie in 0 to 1"),
    "nan": (np.full((2, 2), np.nan), "nan"),
    "objects": (np.array([["a"]]), "dtype <U1"),
}


@pytest.mark.parametrize("name", NO_PICTURE)
def test_what_is_no_picture_is_refused(name: str) -> None:
    source, message = NO_PICTURE[name]
    with pytest.raises(ConfigError, match=message) as caught:
        load_image(source)
    assert len(str(caught.value)) < 300


def test_pipes_do_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        load_image(tmp_path / "pipe")


def test_limits_are_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"\0" * 200)
    few = MediaLimits(max_image_bytes=100, max_image_pixels=50)
    for source in (b"\0" * 101, tmp_path / "long", "data:;base64," + "A" * 200):
        with pytest.raises(ConfigError, match="the limit is 100: make it smaller or raise max_image_bytes"):
            load_image(source, limits=few)
    for source in (PICTURE, PIXELS, torch.from_numpy(PIXELS)):
        with pytest.raises(ConfigError, match="54 pixels; the limit is 50"):
            load_image(source, limits=few)
    with pytest.raises(ConfigError, match="max_frames is 0; it must be a whole number above 0"):
        MediaLimits(max_frames=0)


@pytest.mark.filterwarnings("error")
def test_a_truncated_file_is_an_error_at_every_length() -> None:
    """Never another exception, a warning or a hang; the same for one changed byte."""
    rng = np.random.default_rng(1)
    for kind in FORMATS:
        data = encoded(kind=kind)
        for cut in rng.integers(0, len(data) - 8, 40).tolist():
            for damaged in (data[:cut], data[:cut] + bytes([data[cut] ^ 0xFF]) + data[cut + 1 :]):
                try:
                    decode_image(damaged)
                except ConfigError as error:
                    assert "0x" not in str(error)  # no addresses


def test_videos_have_limits() -> None:
    frames = np.zeros((8, 4, 4, 3), np.uint8)
    assert len(load_video(frames, 100).frames) == 8
    for limits in (MediaLimits(max_frames=7), MediaLimits(max_video_pixels=127)):
        with pytest.raises(ConfigError, match="the limit is (7|127): give"):
            load_video(frames, limits=limits)
        assert len(load_video(frames, 7, limits=limits).frames) == 7
    long = encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(90)], duration=[60_000, 60_000])
    with pytest.raises(ConfigError, match="lasts 120 s; the limit is 100 s"):
        load_video(long, limits=MediaLimits(max_video_s=100))
    for source, message in (
        (b"\0\0\0\x18ftypisom" + b"\0" * 12, "PyAV|broken video/mp4"),
        (b"hello", "no video"),
        ([], "empty list"),
        ([PICTURE, PICTURE.rotate(90, expand=True)], "frame 1 of the video is 6x9, frame 0 is 9x6"),
        (np.zeros((3, 3)), "shape"),
        (7, "a video is a int"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_video(source)
    with pytest.raises(ConfigError, match="num_frames is 0"):
        load_video(frames, 0)
