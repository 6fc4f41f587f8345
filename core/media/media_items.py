"""MediaItems: pictures and videos as callers give them, to the items that a vision model computes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from graftlm.core.chat.messages import ImagePart, VideoPart
from graftlm.core.errors import ConfigError, GraftError, ModelError, shortened
from graftlm.core.kv.memory import trim_blocks
from graftlm.core.media.hf_processor import HfProcessor, Processed, load_hf_processor
from graftlm.core.media.item_pool import ItemPool, Part, Pending
from graftlm.core.media.item_store import ItemStore
from graftlm.core.media.items import Form, Kind, MediaItem, is_bytes
from graftlm.core.media.loading import load_image, read_image, stated_pixels
from graftlm.core.media.pixels import LARGE_PIXELS, bands_of, import_pillow, pixels_of
from graftlm.core.media.video import LoadedVideo, load_video

if TYPE_CHECKING:
    from PIL.Image import Image

    from graftlm.core.config import EngineConfig

_SMALL_FILE = 1 << 20
"""Bytes of a picture file that the caller's thread hashes, to find a known picture."""

_HOST_BYTES = 1 << 28
"""Bytes of the inputs that are kept on the host, beside those of requests under way."""

_LARGEST_SIDE = 4096
"""Width and height in pixels of the largest picture that processors are asked for: they scale larger ones down."""

_PIXELS_AT_ONCE = 1 << 26
"""Pixels of the pictures that are decoded and processed at a time: each needs 4 bytes meanwhile, and 13
with torchvision. One always may."""


class MediaItems:
    """Pictures and videos of one model: to items, each processed once and alone.

    Items are kept by the digest of their pixels, the least recently used go first. Everything is loaded with the
    first picture; a model whose processor cannot be loaded refuses pictures with the reason.
    """

    def __init__(self, model_config: Any, source: str, config: EngineConfig, given: Any = None) -> None:
        self.model_config = model_config
        self._source, self._config, self._given = source, config, given
        self._lock = threading.Lock()
        self._failure: ModelError | None = None
        self._hf: HfProcessor | None = None
        self._items = ItemStore(_HOST_BYTES)
        self._dtypes: set[Any] = set()
        self._pool = ItemPool(self.item, self._known)
        self._room = _Room()

    @property
    def hf(self) -> HfProcessor:
        """Return the processor, loaded once. Raises ConfigError with the reason if it cannot be."""
        with self._lock:
            if self._hf is None and self._failure is None:
                try:
                    found = self._given
                    if found is None:
                        found = load_hf_processor(self._source, trust_remote_code=self._config.trust_remote_code)
                    self._hf = HfProcessor(found, self._config.mm_processor_kwargs or {})
                except ModelError as error:
                    self._failure = error
            if self._hf is None:
                raise ConfigError(f"{self._source or 'the model'} cannot read pictures: {self._failure}")
            return self._hf

    @cached_property
    def placeholders(self) -> dict[Kind, int]:
        """Return the token ids that stand for an embedding of a picture and of a video."""
        names: dict[Kind, tuple[str, ...]] = {
            "image": ("image_token_id", "image_token_index"),
            "video": ("video_token_id", "video_token_index"),
        }
        found: dict[Kind, int] = {}
        for kind, attributes in names.items():
            ids = [getattr(self.model_config, name, None) for name in attributes]
            token_id = next((one for one in ids if isinstance(one, int)), None)
            if token_id is not None:
                found[kind] = token_id
        return found

    def computes_in(self, dtype: Any) -> None:
        """Note the dtype of an encoder: pixels are kept in it, or unchanged for encoders of several dtypes."""
        self._dtypes.add(dtype)
        if len(self._dtypes) > 1:
            self._items.clear()

    # -- items -------------------------------------------------------------------------------------------------

    def load(self, parts: Sequence[Part], places: Sequence[str] = ()) -> list[MediaItem]:
        """Return the item of each part. Raises ConfigError for one that cannot be read.

        places  the place of each part, such as "message 2", for errors
        """
        (found,) = self.load_each([(parts, places)])
        if isinstance(found, GraftError):
            raise found
        return found

    def load_each(self, prompts: Sequence[tuple[Sequence[Part], Sequence[str]]]) -> list[list[MediaItem] | GraftError]:
        """Return the items of each prompt's parts, or its first error. All are read in one pool of threads.

        prompts  parts and their places, as in `load`
        """
        begun = [(self._begun(parts), places) for parts, places in prompts]
        found: list[list[MediaItem] | GraftError] = []
        for pending, places in begun:
            read = [one.item(places[i] if places else "") for i, one in enumerate(pending)]
            error = next((item for item in read if isinstance(item, GraftError)), None)
            found.append(error or [item for item in read if isinstance(item, MediaItem)])
        return found

    def expect(self, prompts: Sequence[Sequence[Part]]) -> list[Pending]:
        """Begin to read the parts of prompts that follow; `load_each` takes what is held of them then."""
        return [item for parts in prompts for item in self._begun(parts)]

    def knows(self, source: Any) -> bool:
        """Return True for the bytes or the data URL of a picture whose item is kept; False for others."""
        return isinstance(source, bytes | str) and self._known(ImagePart(source), among_several=False) is not None

    def _begun(self, parts: Sequence[Part]) -> list[Pending]:
        several = self.hf.several_differ and sum(isinstance(part, ImagePart) for part in parts) > 1
        return [self._pool.begin(part, among_several=several) for part in parts]

    def _known(self, part: Part, *, among_several: bool) -> MediaItem | None:
        """Return the kept item of a small picture file that is given as bytes or as a data URL."""
        if not isinstance(part, ImagePart):
            return None
        source = part.image
        is_file = isinstance(source, bytes) or (isinstance(source, str) and source[:5].lower() == "data:")
        if not is_file or len(source) > _SMALL_FILE:
            return None
        with suppress(Exception):  # the pool raises it again, for the request alone
            content, options = self._content(part)
            return self._items.of_known_file(_file_key(content, among_several, options))
        return None

    def item(self, part: Part, *, among_several: bool = False) -> MediaItem:
        """Return a picture or a video as an item: a known one, or processed now."""
        if isinstance(part, VideoPart):
            return self._video(part)
        content, options = self._content(part)
        load = partial(self._image, content, among_several, options)
        if not isinstance(content, bytes):
            return load()
        return self._items.of_file(_file_key(content, among_several, options), load)

    def _content(self, part: ImagePart) -> tuple[Any, dict[str, Any] | None]:
        """Return the bytes of a picture, or its pixels, and all options of its own."""
        content = read_image(part.image, limits=self._config.media, allow_urls=self._config.media_urls)
        given = part.mm_processor_kwargs
        return content, None if given is None else self.hf.options.of_request(given)

    def largest(self) -> MediaItem:
        """Return a black picture that is as large as the model's processor and the limits allow; it is not kept."""
        side = min(math.isqrt(self._config.media.max_image_pixels), _LARGEST_SIDE)
        return self._made(b"", self.hf.image(import_pillow().new("RGB", (side, side))))

    def _image(self, content: Any, among_several: bool, options: Mapping[str, Any] | None) -> MediaItem:
        with self._room.of(stated_pixels(content)):
            return self._decoded(content, among_several, options)  # which frees the pixels before the room is left

    def _decoded(self, content: Any, among_several: bool, options: Mapping[str, Any] | None) -> MediaItem:
        picture = load_image(content, limits=self._config.media).picture
        if options == self.hf.options.of_runtime:
            options = None
        form = (*picture.size, among_several, *_ordered(options))
        small = picture.width * picture.height <= LARGE_PIXELS
        pixels = pixels_of(picture) if small else None  # once: Pillow holds Python's lock meanwhile
        parts = (band.tobytes() for _, band in bands_of(picture)) if pixels is None else [pixels]
        digest = _digest(self.hf.fingerprint, "image", form, parts)

        def make() -> MediaItem:
            processed = _processed(self.hf, picture, among_several, options, pixels)
            return self._made(digest, processed, Form(*picture.size, options))

        return self._items.of_pixels(digest, make)

    def _video(self, part: VideoPart) -> MediaItem:
        if self.hf.markers["video"] is None or getattr(self.hf.hf, "video_processor", None) is None:
            raise ConfigError(f"this model reads no videos here{_why_no_videos()}; give pictures")
        limits, urls = self._config.media, self._config.media_urls
        video = load_video(part.video, part.num_frames, limits=limits, allow_urls=urls, fps=part.fps)
        times = repr((video.frames.shape, video.fps, video.num_total, video.indices.tolist()))
        digest = _digest(self.hf.fingerprint, "video", (times,), [video.frames.data])
        return self._items.of_pixels(digest, lambda: self._made(digest, _processed_video(self.hf, video)))

    def _made(self, digest: bytes, processed: Processed, form: Form | None = None) -> MediaItem:
        kind: Kind = "video" if "pixel_values_videos" in processed.inputs else "image"
        inputs = processed.inputs
        if len(self._dtypes) == 1:
            (dtype,) = self._dtypes
            pixels = {k: x.to(dtype) for k, x in inputs.items() if k.startswith("pixel_values") and not is_bytes(x)}
            inputs = {**inputs, **pixels}
        count = int((processed.ids == self.placeholders[kind]).sum())
        if not count:
            raise ConfigError(f"the model's processor made no tokens of the {kind}")
        added = self.hf.hf.tokenizer.added_tokens_decoder
        ends = (int(processed.ids[0]), int(processed.ids[-1]))
        alone = all(one in added for one in ends)
        levels = self.hf.levels if any(map(is_bytes, inputs.values())) else None
        placeholder = self.placeholders[kind]
        return MediaItem(kind, digest, processed.text, processed.ids, count, placeholder, inputs, alone, levels, form)


class _Room:
    """The pictures that are decoded and processed at a time, by their pixels."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._used = 0

    @contextmanager
    def of(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for a picture, and hold it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + pixels <= _PIXELS_AT_ONCE)
            self._used += pixels
        try:
            yield
        finally:
            with self._changed:
                self._used -= pixels
                self._changed.notify_all()
            if pixels > LARGE_PIXELS:
                trim_blocks()


def _processed(
    hf: HfProcessor, picture: Image, among_several: bool, options: Mapping[str, Any] | None, pixels: Any = None
) -> Processed:
    """Process a picture. Raises ConfigError if the processor refuses the picture, or its own options."""
    try:
        return hf.image(picture, among_several=among_several, options=options, pixels=pixels)
    except Exception as error:  # processors raise any error
        if options is None and not isinstance(error, ValueError):
            raise
        given = "" if options is None else f" with mm_processor_kwargs {shortened(options)}"
        size = f"a picture of {picture.width:,} x {picture.height:,} pixels"
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"the model's processor refuses {size}{given}: {why}; give another size") from error


def _processed_video(hf: HfProcessor, video: LoadedVideo) -> Processed:
    """Process a video. Raises ConfigError if the processor refuses it: Qwen3-VL's takes two frames or more."""
    try:
        return hf.video(video)
    except ValueError as error:
        count, height, width, _ = video.frames.shape
        size = f"a video of {count:,} frame{'' if count == 1 else 's'} of {width:,} x {height:,} pixels"
        why = f"ValueError: {str(error)[:200]}"
        raise ConfigError(f"the model's processor refuses {size}: {why}; give more frames, or a picture") from error


def _ordered(options: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a picture's own options as texts, in one order."""
    return () if options is None else (json.dumps(options, sort_keys=True),)


def _file_key(content: bytes, among_several: bool, options: Mapping[str, Any] | None) -> bytes:
    return f"{among_several} {_ordered(options)} ".encode() + hashlib.sha256(content).digest()


def _digest(fingerprint: bytes, kind: Kind, size: tuple[Any, ...], pixels: Iterable[Any]) -> bytes:
    """Return the identity of a picture or a video of one processor, which `fingerprint` names.

    pixels  in parts, which are contiguous buffers
    """
    tag = f"{kind} {size}".encode()
    lengths = f"{len(tag)} {len(fingerprint)} ".encode()
    digest = hashlib.sha256(lengths + tag + fingerprint)  # processors compute it faster than others
    for part in pixels:
        digest.update(part)
    return digest.digest()


def _why_no_videos() -> str:
    """Return the reason for which processors have no part for videos, where it is a missing package."""
    if importlib.util.find_spec("torchvision") is not None:
        return ""
    return ": transformers' part for videos needs torchvision, the build that belongs to the installed torch"
