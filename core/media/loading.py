"""load_image: a path, bytes, a data URL or an object to one RGB picture, within limits.

The header is checked before a pixel is decoded, and only decoders of five formats run. Pillow's own limits belong to
the whole process; they are neither used nor changed.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np

from graftlm.core.errors import ConfigError, shortened
from graftlm.core.media.limits import MediaLimits as MediaLimits
from graftlm.core.media.pixels import as_rgb, import_pillow, narrowed, upright_rgb

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

FORMATS: Mapping[str, str] = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
}
"""Formats that are decoded, with their MIME types. Other decoders of Pillow are never run on a caller's bytes."""

_READ = ", ".join(FORMATS)
_MOST_SEGMENTS = 4096  # of a JPEG's header, and stray bytes between them
_MOST_SCANS = 64  # of a JPEG; progressive files have about ten, and each costs a pass over all pixels
_HELD_BYTES = 6
"""Bytes for each of `max_image_pixels` that decoding a picture may hold. The decoded picture has four of them."""


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """A decoded picture.

    picture    the pixels, a Pillow image of mode RGB, upright
    encoded    the file's bytes; None for a picture that came as pixels
    mime_type  the file's type by its first bytes; "image/png" for pixels
    """

    picture: Image
    encoded: bytes | None
    mime_type: str


def load_image(source: Any, *, limits: MediaLimits | None = None, allow_urls: bool = False) -> LoadedImage:
    """Decode a picture.

    source      a path (`str`, `Path`, `file://`), bytes, a data URL, a Pillow image, a LoadedImage, or pixels as a
                numpy array or a torch tensor: [height, width], [height, width, channels] or [channels, height, width]
                of 1, 3 or 4 channels, as uint8, as uint16, or as floats in 0 to 1
    allow_urls  whether an https URL of a public address is fetched

    Files are turned upright by their EXIF orientation; a Pillow image is taken as it is. Alpha is dropped, 16 bits
    become 8, and an animation gives its first frame, all as transformers does.

    Raises: ConfigError that names the limit or the fault; it never repeats the picture's bytes.
    """
    limits = limits or MediaLimits()
    content = read_image(source, limits=limits, allow_urls=allow_urls)
    if isinstance(content, LoadedImage):
        return content
    if isinstance(content, bytes):
        return decode_image(content, limits)
    try:
        _check_size(*content.size, limits)
        return LoadedImage(as_rgb(content), None, FORMATS["PNG"])
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the picture's pixels cannot be read: {_reason(error)}; convert it to RGB") from error


def read_image(
    source: Any, *, limits: MediaLimits | None = None, allow_urls: bool = False
) -> bytes | Image | LoadedImage:
    """Return a picture's encoded bytes without decoding them, or a Pillow image if it came as pixels.

    The arguments and errors are those of `load_image`. The bytes are at most `max_image_bytes` long.
    """
    limits = limits or MediaLimits()
    if isinstance(source, LoadedImage):
        return source
    content = read_source(source, "picture", limits.max_image_bytes, limits, allow_urls)
    if content is not None:
        return content
    if _is_pillow(source):
        return source  # type: ignore[no-any-return]
    if hasattr(source, "__array__") or hasattr(source, "detach"):
        pixels = as_array(source)
        _check_size(*_sides(pixels), limits)
        image: Image = import_pillow().fromarray(_as_bytes(pixels))
        return image
    raise ConfigError(
        f"a picture is a {type(source).__name__}; give a path, bytes, a data URL, a Pillow image, an array or a tensor"
    )


def decode_image(encoded: bytes, limits: MediaLimits | None = None) -> LoadedImage:
    """Decode the bytes of a picture file. Raises ConfigError as `load_image`."""
    limits = limits or MediaLimits()
    check_bytes(len(encoded), "picture", limits.max_image_bytes, "max_image_bytes")
    name = _format_of(encoded, len(encoded))
    width, height = _header_size(encoded, name)
    _check_size(width, height, limits)
    _check_held(width * height * _held_bytes(encoded, name), f"{name} of {width}x{height}", limits)
    scans = encoded.count(b"\xff\xda") if name == "JPEG" else 0
    if scans > _MOST_SCANS:
        raise ConfigError(f"the picture is a JPEG of {scans} scans; the limit is {_MOST_SCANS}: save it again")
    pillow = import_pillow()
    try:
        picture = pillow.open(io.BytesIO(encoded), formats=(name,))
        width, height = picture.size
        _check_size(width, height, limits)
        return LoadedImage(upright_rgb(picture), encoded, FORMATS[name])
    except ConfigError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        remedy = "make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS as well"
        raise ConfigError(f"the picture exceeds Pillow's own limit: {_reason(error)}; {remedy}") from error
    except Exception as error:  # decoders raise errors of a dozen types for broken files
        raise ConfigError(
            f"the picture is a broken {name} of {len(encoded):,} bytes: {_reason(error)}; send the whole file"
        ) from error


def _format_of(encoded: bytes, num_bytes: int) -> str:
    """Return the name of a picture's format by its first bytes. Raises ConfigError for one that is not decoded.

    num_bytes  of the whole picture, for the message
    """
    mime_type = media_type(encoded)
    name = next((key for key, value in FORMATS.items() if value == mime_type), None)
    if name is None:
        found = f"{mime_type}, which is not" if mime_type else f"{num_bytes:,} bytes that are no picture"
        raise ConfigError(f"the picture is {found} read here; send {_READ}")
    return name


def media_type(encoded: bytes) -> str | None:
    """Return the MIME type of a picture or a video by its first bytes; None for an unknown kind."""
    head = encoded[:16]
    for magic, mime_type in _MAGIC:
        if head.startswith(magic):
            return mime_type
    if head[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}.get(head[8:12])
    if head[4:8] == b"ftyp":
        brand = head[8:12]
        if brand in (b"avif", b"avis"):
            return "image/avif"
        return "image/heic" if brand in (b"heic", b"heix", b"mif1", b"msf1") else "video/mp4"
    return None


_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
    (b"\x1aE\xdf\xa3", "video/webm"),
)


# -- sources to bytes ----------------------------------------------------------------------------------------------


def read_source(source: Any, kind: str, limit: int, limits: MediaLimits, allow_urls: bool) -> bytes | None:
    """Return the bytes that a path, a URL, a data URL or a buffer holds; None for another object.

    kind   "picture" or "video", for messages
    limit  most bytes
    """
    name = "max_image_bytes" if kind == "picture" else "max_video_bytes"
    if isinstance(source, bytes | bytearray | memoryview):
        check_bytes(memoryview(source).nbytes, kind, limit, name)
        return bytes(source)
    if isinstance(source, str):
        if source[:5].lower() == "data:":
            return data_of_url(source, kind, limit, name)
        if is_url(source):
            if not allow_urls:
                raise ConfigError(
                    f"the {kind} is the URL {shortened(source)}, and none is fetched; give its bytes or a path, or "
                    "set media_urls=True (allow_urls=True of load_image)"
                )
            from graftlm.core.media.access import fetch

            return fetch(source, max_bytes=limit, seconds=limits.fetch_s)
        if source[:7].lower() == "file://":
            source = unquote(urlsplit(source).path)
    if isinstance(source, str | os.PathLike):
        return read_file(source, kind, limit, name)
    return None


def is_url(source: str) -> bool:
    """Return True for an address on a network."""
    return source[:8].lower().startswith(("http://", "https://"))


def data_of_url(url: str, kind: str, limit: int, name: str = "max_image_bytes") -> bytes:
    """Decode a data URL. Raises ConfigError for broken base64 and above `limit` bytes."""
    header, comma, data = url.partition(",")
    if not comma:
        raise ConfigError(f"the {kind} is a data URL without a comma; write data:image/png;base64,...")
    if not header.lower().endswith(";base64"):
        check_bytes(len(data) // 3, kind, limit, name)
        return unquote_to_bytes(data)
    return data_of_base64(data, kind, limit, name)


def data_of_base64(data: str | bytes, kind: str, limit: int, name: str = "max_image_bytes") -> bytes:
    """Decode base64 text, of either alphabet, with line breaks and without padding as well."""
    num_bytes = len(data) * 3 // 4
    check_bytes(num_bytes - 2, kind, limit, name)
    pieces: list[bytes] = []
    rest = b""  # characters that belong to the next piece
    try:
        for start in range(0, len(data), _BASE64_PIECE):
            piece = data[start : start + _BASE64_PIECE]
            plain = rest + (piece.encode("ascii") if isinstance(piece, str) else bytes(piece)).translate(
                _ALPHABET, b"\r\n\t ="
            )
            cut = len(plain) & ~3
            pieces.append(base64.b64decode(plain[:cut], validate=True))
            rest = plain[cut:]
            if start + _BASE64_PIECE < len(data):
                if start == 0 and kind == "picture":
                    _format_of(pieces[0], num_bytes)
                time.sleep(_PAUSE_S)
        pieces.append(base64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True))
    except (binascii.Error, UnicodeEncodeError) as error:
        found = f"the {kind} is broken base64 of {len(data):,} characters"
        raise ConfigError(f"{found}: {_reason(error)}; encode the whole file") from error
    return b"".join(pieces)


_BASE64_PIECE, _PAUSE_S = 1 << 18, 1e-4
"""Characters that are decoded at once, in less than a millisecond, and the seconds after them in which other threads
get Python's lock, which the decoder holds."""

_ALPHABET = bytes.maketrans(b"-_", b"+/")


def read_file(path: str | os.PathLike[str], kind: str, limit: int, name: str) -> bytes:
    """Read a regular file. Raises ConfigError for another kind of file and above `limit` bytes."""
    shown = shortened(os.fspath(path))
    try:
        with open(Path(path).expanduser(), "rb", opener=_open_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"the {kind} {shown} is no regular file; give a path to a file, or bytes")
            check_bytes(found.st_size, kind, limit, name)
            return file.read(limit + 1)[:limit]
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        what = (
            "is no file" if isinstance(error, FileNotFoundError | ValueError) else f"cannot be read ({_reason(error)})"
        )
        raise ConfigError(f"the {kind} {shown} {what}; give a path, bytes or a data URL") from error


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its writer


def check_bytes(count: int, kind: str, limit: int, name: str) -> None:
    """Raise ConfigError unless a picture or a video has 1 to `limit` bytes."""
    if count > limit:
        raise ConfigError(f"the {kind} has {count:,} bytes; the limit is {limit:,}: make it smaller or raise {name}")
    if count == 0:
        raise ConfigError(f"the {kind} is empty; give the bytes of a file")


# -- headers -------------------------------------------------------------------------------------------------------


def _header_size(encoded: bytes, name: str) -> tuple[int, int]:
    """Return width and height as the header states them. Raises ConfigError for a header that is cut off."""
    try:
        if name == "PNG":
            if encoded[12:16] != b"IHDR":
                raise IndexError
            width, height = struct.unpack_from(">II", encoded, 16)
        elif name == "GIF":
            width, height = struct.unpack_from("<HH", encoded, 6)
        elif name == "BMP":
            old = struct.unpack_from("<I", encoded, 14)[0] == 12
            width, height = struct.unpack_from("<HH" if old else "<ii", encoded, 18)
        elif name == "WEBP":
            width, height = _webp_size(encoded)
        else:
            width, height = _jpeg_frame(encoded)[:2]
    except (struct.error, IndexError):
        raise ConfigError(
            f"the picture is a broken {name} of {len(encoded):,} bytes: its header is damaged; send the whole file"
        ) from None
    return int(width), abs(int(height))


def stated_pixels(content: bytes | Image | LoadedImage) -> int:
    """Return width times height of a picture by its header; 0 if it cannot be read."""
    if isinstance(content, LoadedImage):
        content = content.picture
    if not isinstance(content, bytes):
        return content.width * content.height
    try:
        width, height = _header_size(content, _format_of(content, len(content)))
    except ConfigError:
        return 0
    return width * height


def _webp_size(encoded: bytes) -> tuple[int, int]:
    chunk = encoded[12:16]
    if chunk == b"VP8X":
        return 1 + int.from_bytes(encoded[24:27], "little"), 1 + int.from_bytes(encoded[27:30], "little")
    if chunk == b"VP8L":
        (bits,) = struct.unpack_from("<I", encoded, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", encoded, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_frame(encoded: bytes) -> tuple[int, int, float]:
    """Follow the segments to the frame header. Raises IndexError if there is none.

    -> width, height, and coefficients a pixel that a decoder holds: none if it writes pixels as it reads
    """
    at = 2
    for _ in range(_MOST_SEGMENTS):
        marker = encoded[at + 1]
        if encoded[at] != 0xFF or marker == 0xFF:  # bytes between segments
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width, num_planes = struct.unpack_from(">HHB", encoded, at + 5)
            planes = [divmod(encoded[at + 11 + 3 * i], 16) for i in range(num_planes)]
            counts = [x * y for x, y in planes]
            return width, height, sum(counts) / max([1, *counts]) if marker in _PROGRESSIVE else 0.0
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            at += 2
        else:
            at += 2 + max(struct.unpack_from(">H", encoded, at + 2)[0], 2)
    raise IndexError(at)


_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)


def _held_bytes(encoded: bytes, name: str) -> float:
    """Return the bytes a pixel that a decoder holds, with those of the decoded picture."""
    if name == "JPEG":
        return 4 + 2 * _jpeg_frame(encoded)[2]
    return 16 if name == "WEBP" else 4  # two canvases and the frame of an animation, which it may be


def _check_held(num_bytes: float, shown: str, limits: MediaLimits) -> None:
    most = _HELD_BYTES * limits.max_image_pixels
    if num_bytes > most:
        kind = "progressive " if shown.startswith("JPEG") else ""
        raise ConfigError(
            f"the picture is a {kind}{shown}, which takes {num_bytes / 1e6:,.0f} MB to decode; the limit is "
            f"{most / 1e6:,.0f} MB, {_HELD_BYTES} bytes for each of max_image_pixels: make it smaller, save it as PNG "
            "or baseline JPEG, or raise max_image_pixels"
        )


def _check_size(width: int, height: int, limits: MediaLimits) -> None:
    if width < 1 or height < 1:
        raise ConfigError(f"the picture is {width}x{height}; it must have at least one pixel")
    if width * height > limits.max_image_pixels:
        raise ConfigError(
            f"the picture is {width}x{height}, {width * height:,} pixels; the limit is {limits.max_image_pixels:,}: "
            "make it smaller or raise max_image_pixels"
        )


# -- pixels --------------------------------------------------------------------------------------------------------


def _is_pillow(source: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # an object of a module that was never imported does not exist
    return module is not None and isinstance(source, module.Image)


def as_array(source: Any) -> NDArray[Any]:
    """Return a numpy array or a tensor of any device as an array."""
    if hasattr(source, "detach"):  # a torch tensor
        source = source.detach().cpu()
        source = (source.float() if source.dtype.is_floating_point else source).numpy()
    array = np.asarray(source)
    if array.dtype.kind not in "uif":
        raise ConfigError(f"the pixels are of dtype {array.dtype}; give uint8, uint16, or floats in 0 to 1")
    return array


def _sides(pixels: NDArray[Any]) -> tuple[int, int]:
    """Return width and height of [height, width], [height, width, channels] or [channels, height, width]."""
    if pixels.ndim == 2:
        return pixels.shape[1], pixels.shape[0]
    if pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4):
        return pixels.shape[1], pixels.shape[0]
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3, 4):
        return pixels.shape[2], pixels.shape[1]
    raise ConfigError(
        f"the picture's pixels have the shape {list(pixels.shape)}; give [height, width, channels], [channels, height, "
        "width] or [height, width], with 1, 3 or 4 channels"
    )


def _as_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels as uint8 [height, width] or [height, width, channels of RGB or RGBA]."""
    if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return np.ascontiguousarray(to_uint8(pixels))


def to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return pixels of any dtype as uint8. Raises ConfigError for values out of range and NaN."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.uint16:
        return narrowed(pixels)
    most = 1 if pixels.dtype.kind == "f" else 255
    low, high = pixels.min(), pixels.max()
    if not (low >= 0 and high <= most):  # NaN is neither
        raise ConfigError(
            f"the pixels of dtype {pixels.dtype} lie in {low} to {high}; they must lie in 0 to {most}: divide, or clip"
        )
    return (pixels * 255 + 0.5).astype(np.uint8) if most == 1 else pixels.astype(np.uint8)


def _reason(error: BaseException) -> str:
    """Return a decoder's message on one line, shortened; it may hold an object's address or a file's bytes."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    text = " ".join(str(error).split()) or type(error).__name__
    if "<_io." in text:  # Pillow names the buffer
        text = "its header cannot be read"
    return text if len(text) <= 120 else f"{text[:120]}..."
