"""load_video: a file, an animation, frames or an array to evenly spaced RGB frames with their times."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.errors import ConfigError
from graftlm.core.media.loading import (
    FORMATS,
    MediaLimits,
    as_array,
    check_bytes,
    load_image,
    media_type,
    read_source,
    to_uint8,
)
from graftlm.core.media.pixels import import_pillow

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CONTAINERS = {"video/mp4": "mp4", "video/webm": "matroska", "video/x-msvideo": "avi"}
_ANIMATIONS = ("image/gif", "image/png", "image/webp")
_USUAL_FPS = 24.0  # of frames without times, as transformers assumes


@dataclass(frozen=True, eq=False)
class LoadedVideo:
    """Sampled frames of a video.

    frames      uint8 [num_frames, height, width, 3]
    timestamps  float64 [num_frames], seconds since the first frame
    indices     int64 [num_frames], numbers of the frames in the whole video
    num_total   frames of the whole video
    fps         frames a second of the whole video
    encoded     the file's bytes; None for frames
    mime_type   the file's type by its first bytes; None for frames
    """

    frames: NDArray[np.uint8]
    timestamps: NDArray[np.float64]
    indices: NDArray[np.int64]
    num_total: int
    fps: float
    encoded: bytes | None = None
    mime_type: str | None = None


def load_video(
    source: Any,
    num_frames: int | None = None,
    *,
    limits: MediaLimits | None = None,
    allow_urls: bool = False,
    fps: float | None = None,
) -> LoadedVideo:
    """Decode evenly spaced frames of a video.

    source      a path, bytes or a data URL of an MP4, WebM, Matroska or AVI file, or of a GIF, PNG or WebP animation; a
                sequence of pictures; or frames as an array or a tensor [num_frames, height, width, 3] or
                [num_frames, 3, height, width]
    num_frames  frames to keep; None keeps all. A shorter video keeps all of its frames
    fps         frames a second of `source`, if it is frames; 24 if it is None
    allow_urls  whether an https URL of a public address is fetched

    Frame i of n is number floor(i * total / n), as transformers samples.

    Raises: ConfigError that names the limit or the fault. MP4, WebM, Matroska and AVI need PyAV.
    """
    limits = limits or MediaLimits()
    if isinstance(source, LoadedVideo):
        return source
    if num_frames is not None and (isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1):
        raise ConfigError(f"num_frames is {num_frames!r}; it must be a whole number above 0, or None")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < 1e6):
        raise ConfigError(f"fps is {fps!r}; it must be a number above 0, or None")
    encoded = read_source(source, "video", limits.max_video_bytes, limits, allow_urls)
    if encoded is not None:
        return _decoded(encoded, num_frames, limits)
    if hasattr(source, "__array__") or hasattr(source, "detach"):
        return _of_array(as_array(source), num_frames, limits, fps)
    if isinstance(source, Sequence):
        return _of_pictures(source, num_frames, limits, fps)
    raise ConfigError(
        f"a video is a {type(source).__name__}; give a path, bytes, a data URL, a list of pictures or an array"
    )


def sample_indices(total: int, num_frames: int | None) -> NDArray[np.int64]:
    """Return the numbers of evenly spaced frames: all of them if there are at most `num_frames`."""
    if num_frames is None or num_frames >= total:
        return np.arange(total, dtype=np.int64)
    return np.arange(num_frames, dtype=np.int64) * total // num_frames


def _check(count: int, width: int, height: int, limits: MediaLimits) -> None:
    """Raise ConfigError unless the sampled frames are within the limits."""
    if count < 1 or width < 1 or height < 1:
        raise ConfigError(f"the video is {count} frames of {width}x{height}; it must have at least one pixel")
    if count > limits.max_frames:
        raise ConfigError(
            f"the video gives {count:,} frames; the limit is {limits.max_frames:,}: give a smaller num_frames, or "
            "raise max_frames"
        )
    if count * width * height > limits.max_video_pixels:
        raise ConfigError(
            f"the video gives {count:,} frames of {width}x{height}, {count * width * height:,} pixels; the limit is "
            f"{limits.max_video_pixels:,}: give fewer num_frames, or raise max_video_pixels"
        )


def _of_array(frames: NDArray[Any], num_frames: int | None, limits: MediaLimits, fps: float | None) -> LoadedVideo:
    if frames.ndim != 4 or 3 not in (frames.shape[1], frames.shape[3]):
        raise ConfigError(
            f"the video's frames have the shape {list(frames.shape)}; give [num_frames, height, width, 3] or "
            "[num_frames, 3, height, width]"
        )
    if frames.shape[3] != 3:
        frames = frames.transpose(0, 2, 3, 1)
    indices = sample_indices(len(frames), num_frames)
    _check(len(indices), frames.shape[2], frames.shape[1], limits)
    return _video(np.ascontiguousarray(to_uint8(frames[indices])), indices, len(frames), fps or _USUAL_FPS)


def _of_pictures(
    pictures: Sequence[Any], num_frames: int | None, limits: MediaLimits, fps: float | None
) -> LoadedVideo:
    indices = sample_indices(len(pictures), num_frames)
    frames: list[NDArray[np.uint8]] = []
    for index in indices.tolist():
        picture = load_image(pictures[index], limits=limits).picture
        _check(len(indices), *picture.size, limits)
        if frames and frames[0].shape[:2] != picture.size[::-1]:
            first = f"{frames[0].shape[1]}x{frames[0].shape[0]}"
            raise ConfigError(
                f"frame {index} of the video is {picture.width}x{picture.height}, frame {indices[0]} is {first}; give "
                "frames of one size"
            )
        frames.append(np.asarray(picture))
    if not frames:
        raise ConfigError("the video is an empty list; give at least one frame")
    return _video(np.stack(frames), indices, len(pictures), fps or _USUAL_FPS)


def _video(
    frames: NDArray[np.uint8],
    indices: NDArray[np.int64],
    total: int,
    fps: float,
    encoded: bytes | None = None,
    mime_type: str | None = None,
) -> LoadedVideo:
    return LoadedVideo(frames, indices / fps, indices, total, fps, encoded, mime_type)


def _decoded(encoded: bytes, num_frames: int | None, limits: MediaLimits) -> LoadedVideo:
    check_bytes(len(encoded), "video", limits.max_video_bytes, "max_video_bytes")
    mime_type = media_type(encoded)
    try:
        if mime_type in _CONTAINERS:
            frames, indices, total, fps = _of_container(encoded, _CONTAINERS[mime_type], num_frames, limits)
        elif mime_type in _ANIMATIONS:
            frames, indices, total, fps = _of_animation(encoded, mime_type, num_frames, limits)
        else:
            found = f"{mime_type}, which is not" if mime_type else f"{len(encoded):,} bytes that are no video"
            raise ConfigError(f"the video is {found} read here; send MP4, WebM, Matroska, AVI, GIF, PNG or WebP")
    except ConfigError:
        raise
    except Exception as error:  # decoders raise errors of a dozen types for broken files
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise ConfigError(f"the video is a broken {mime_type} of {len(encoded):,} bytes: {text}") from error
    return _video(frames, indices, total, fps, encoded, mime_type)


def _of_animation(
    encoded: bytes, mime_type: str, num_frames: int | None, limits: MediaLimits
) -> tuple[NDArray[np.uint8], NDArray[np.int64], int, float]:
    """Decode an animation: every frame up to the last sampled one, since each changes the one before."""
    first = load_image(encoded, limits=limits).picture
    name = next(key for key, value in FORMATS.items() if value == mime_type)
    with import_pillow().open(io.BytesIO(encoded), formats=(name,)) as file:
        total = int(getattr(file, "n_frames", 1))
        indices = sample_indices(total, num_frames)
        _check(len(indices), first.width, first.height, limits)
        _check_work(total, first.width, first.height, limits)
        frames: list[NDArray[np.uint8]] = []
        seconds = 0.0
        for index in range(total):
            file.seek(index)
            file.load()  # a WebP states a frame's duration once it is decoded
            seconds += float(file.info.get("duration") or 0.0) / 1000
            if len(frames) < len(indices) and index == indices[len(frames)]:
                frames.append(np.asarray(file.convert("RGBA").convert("RGB")))
    _check_seconds(seconds, limits)
    return np.stack(frames), indices, total, total / seconds if seconds > 0 else _USUAL_FPS


_DECODED_SHARE = 64
"""Pixels that are decoded at most, in `max_video_pixels`: frames between the sampled ones are decoded as well."""


def _check_work(count: int, width: int, height: int, limits: MediaLimits) -> None:
    most = _DECODED_SHARE * limits.max_video_pixels
    if count * width * height > most:
        raise ConfigError(
            f"the video is {count:,} frames of {width}x{height}, {count * width * height:,} pixels; at most {most:,} "
            "are decoded: make it shorter or smaller, or raise max_video_pixels"
        )


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.max_video_s:
        raise ConfigError(
            f"the video lasts {seconds:,.0f} s; the limit is {limits.max_video_s:,.0f} s: cut it, or raise max_video_s"
        )


def _of_container(
    encoded: bytes, container: str, num_frames: int | None, limits: MediaLimits
) -> tuple[NDArray[np.uint8], NDArray[np.int64], int, float]:
    """Decode a film's sampled frames. Its format is given, so that no playlist is read, which could name files."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            "videos are decoded with PyAV, which is not installed; pip install av, or give frames"
        ) from error
    with av.open(io.BytesIO(encoded), format=container, metadata_errors="replace") as file:
        if not file.streams.video:
            raise ConfigError("the video file holds no film; give one with a video stream")
        stream = file.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else _USUAL_FPS
        if not 0 < fps < 1e6:
            fps = _USUAL_FPS
        width, height = stream.codec_context.width, stream.codec_context.height
        total = sum(1 for packet in islice(file.demux(stream), int(limits.max_video_s * fps) + 2) if packet.size)
        _check_seconds(total / fps, limits)
    indices = sample_indices(total, num_frames)
    _check(len(indices), width, height, limits)
    _check_work(int(indices[-1]) + 1, width, height, limits)
    frames: list[NDArray[np.uint8]] = []
    with av.open(io.BytesIO(encoded), format=container, metadata_errors="replace") as file:
        file.streams.video[0].thread_count = 1
        for index, frame in enumerate(file.decode(video=0)):
            if frame.width != width or frame.height != height:
                raise ConfigError(f"the video changes its size at frame {index}; give one of a single size")
            if index == indices[len(frames)]:
                frames.append(frame.to_ndarray(format="rgb24"))
                if len(frames) == len(indices):
                    break
    if len(frames) < len(indices):  # packets that hold no frame of their own, at the end
        indices, total = indices[: len(frames)], min(total, index + 1 if frames else 0)
    if not frames:
        raise ConfigError("the video's frames cannot be decoded; send the whole file")
    return np.stack(frames), indices, total, fps
