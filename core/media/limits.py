"""MediaLimits: limits of the pictures and videos of a request; the types of the parts that hold them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from graftlm.core.errors import ConfigError

IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")
"""Types of the parts of a message that hold a picture or a video."""


@dataclass(frozen=True)
class MediaLimits:
    """Limits of the pictures and videos of one request. Values above a limit raise ConfigError.

    max_image_bytes   encoded bytes of a picture
    max_image_pixels  width times height of a picture, read from its header before it is decoded
    max_images        pictures in a request
    max_videos        videos in a request
    max_video_bytes   encoded bytes of a video
    max_video_pixels  pixels of all sampled frames of a video
    max_frames        sampled frames of a video
    max_video_s       seconds that a video lasts
    fetch_s           seconds until a URL's bytes have arrived
    """

    max_image_bytes: int = 20_000_000
    max_image_pixels: int = 1 << 25
    max_images: int = 64
    max_videos: int = 8
    max_video_bytes: int = 200_000_000
    max_video_pixels: int = 1 << 28
    max_frames: int = 768
    max_video_s: float = 3600.0
    fetch_s: float = 10.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, whole = getattr(self, each.name), isinstance(each.default, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not value > 0:
                kind = "a whole number above 0" if whole else "a number above 0"
                raise ConfigError(f"{each.name} is {value!r}; it must be {kind}")
