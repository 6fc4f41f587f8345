"""MediaProcessor: rendered messages with pictures and videos to the PromptInput that a vision model computes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.chat.messages import ImagePart, Message, TextPart, VideoPart
from graftlm.core.errors import ConfigError, GraftError, ModelError, failure_of, shortened
from graftlm.core.kv.memory import trim_blocks
from graftlm.core.media.grid_positions import GridPositions
from graftlm.core.media.hf_processor import HfProcessor, Processed, load_hf_processor
from graftlm.core.media.item_store import ItemStore
from graftlm.core.media.items import Kind, MediaItem, MediaText, is_bytes, place
from graftlm.core.media.loading import load_image, read_image, stated_pixels
from graftlm.core.media.pixels import BAND_PIXELS, LARGE_PIXELS, import_pillow
from graftlm.core.media.video import load_video
from graftlm.core.prompt_input import BothWays, Layout, PromptInput, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from graftlm.core.config import EngineConfig

Part = ImagePart | VideoPart

_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that decode and process pictures. Pillow and torch release the GIL; each thread computes on one core."""

_HOST_BYTES = 1 << 28
"""Bytes of the inputs that are kept on the host, beside those of requests under way."""

_LARGEST_SIDE = 4096
"""Width and height in pixels of the largest picture that processors are asked for: they scale larger ones down."""

_PIXELS_AT_ONCE = 1 << 26
"""Pixels of the pictures that are decoded and processed at a time: each needs 4 bytes meanwhile, and 13
with torchvision. One always may."""


def reads_pictures(config: Any) -> bool:
    """Return True if transformers has a class for this configuration that reads pictures and writes text."""
    if getattr(config, "vision_config", None) is None:
        return False
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def both_ways(config: Any) -> BothWays:
    """Return the layers in which the tokens of a picture see each other in both directions."""
    if config.model_type == "gemma3":
        return "all"
    return "windowed" if getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision" else ""


class MediaProcessor:
    """Pictures and videos of one model: to items, each processed once and alone, and to their place in a prompt.

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
        self._room = _Room()
        self._positions = GridPositions(model_config)

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
        given: list[tuple[Part, str, bool]] = []
        for parts, places in prompts:
            several = self.hf.several_differ and sum(isinstance(part, ImagePart) for part in parts) > 1
            given += [(part, places[i] if places else "", several) for i, part in enumerate(parts)]
        read = self._pool.map(partial(_try_item, self), given)
        found: list[list[MediaItem] | GraftError] = []
        for parts, _ in prompts:
            items = [next(read) for _ in parts]
            error = next((item for item in items if isinstance(item, GraftError)), None)
            found.append(error or [item for item in items if isinstance(item, MediaItem)])
        return found

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        import torch

        return ThreadPoolExecutor(_THREADS, "graftlm pictures", initializer=partial(torch.set_num_threads, 1))

    def item(self, part: Part, *, among_several: bool = False) -> MediaItem:
        """Return a picture or a video as an item: a known one, or processed now."""
        if isinstance(part, VideoPart):
            return self._video(part)
        limits, urls = self._config.media, self._config.media_urls
        content = read_image(part.image, limits=limits, allow_urls=urls)
        options = None if part.mm_processor_kwargs is None else self.hf.options.of_request(part.mm_processor_kwargs)
        load = partial(self._image, content, among_several, options)
        if not isinstance(content, bytes):
            return load()
        form = f"{among_several} {_ordered(options)} ".encode()
        return self._items.of_file(form + hashlib.sha256(content).digest(), load)

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
        digest = _digest(self.hf.fingerprint, "image", form, _bands(picture))
        return self._items.of_pixels(
            digest,
            lambda: self._made(digest, _processed(self.hf, picture, among_several, options)),
        )

    def _video(self, part: VideoPart) -> MediaItem:
        if self.hf.markers["video"] is None or getattr(self.hf.hf, "video_processor", None) is None:
            raise ConfigError(f"this model reads no videos here{_why_no_videos()}; give pictures")
        limits, urls = self._config.media, self._config.media_urls
        video = load_video(part.video, part.num_frames, limits=limits, allow_urls=urls, fps=part.fps)
        times = repr((video.frames.shape, video.fps, video.num_total, video.indices.tolist()))
        digest = _digest(self.hf.fingerprint, "video", (times,), [video.frames.data])
        return self._items.of_pixels(digest, lambda: self._made(digest, self.hf.video(video)))

    def _made(self, digest: bytes, processed: Processed) -> MediaItem:
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
        return MediaItem(kind, digest, processed.text, processed.ids, count, placeholder, inputs, alone, levels)

    def fragment(self, kind: Kind) -> str:
        """Return the text that the chat template writes for a picture or a video inside a user's turn.

        Raises: ConfigError if it writes none.
        """
        text = self.hf.fragment(kind) if self.hf.markers[kind] is not None else ""
        if not text:
            noun = "a picture" if kind == "image" else "a video"
            raise ConfigError(f"the model's chat template has no place for {noun}; leave it out")
        return text

    # -- prompts -----------------------------------------------------------------------------------------------

    def text(self, messages: Iterable[Message], render: Callable[[], str]) -> MediaText:
        """Render messages of which some hold pictures.

        render  renders them with the chat template
        Raises ConfigError if a user's text holds a marker, or the template drops a picture.
        """
        messages = list(messages)
        parts = media_parts(messages)
        markers = [self.hf.markers[kind_of(part)] for part in parts]
        places = [f"message {index}" for index, message in enumerate(messages) for _ in media_parts([message])]
        self._check_counts(parts, places)
        for part, marker in zip(parts, markers, strict=True):
            if marker is None:
                raise ConfigError(f"the model's chat template has no place for {_a(part)}; leave it out")
        reserved = {token for token in (*self.hf.markers.values(), *self._placeholder_texts) if token}
        for index, message in enumerate(messages):
            written = next((token for token in reserved if token in message.text), None)
            if written is not None:
                raise ConfigError(
                    f"message {index} writes {written!r}, which stands for a picture; remove it from the text"
                )
        text = render()
        found = re.findall("|".join(map(re.escape, self._marker_texts)), text)
        if found != markers:
            raise ConfigError(
                f"the chat template wrote {len(found)} pictures and videos of {len(parts)}; put them into messages "
                "of the user"
            )
        return MediaText.of(text, parts, places)

    def _check_counts(self, parts: Sequence[Part], places: Sequence[str]) -> None:
        limits = self._config.media
        for kind, most, noun in ((ImagePart, limits.max_images, "images"), (VideoPart, limits.max_videos, "videos")):
            found = [place for part, place in zip(parts, places, strict=True) if isinstance(part, kind)]
            if len(found) > most:
                raise ConfigError(
                    f"{found[most]} holds number {most + 1} of {len(found)} {noun}; the limit of a request is {most}: "
                    f"send fewer, or raise max_{noun}"
                )

    @cached_property
    def _marker_texts(self) -> list[str]:
        return sorted({marker for marker in self.hf.markers.values() if marker}, key=len, reverse=True)

    @cached_property
    def _placeholder_texts(self) -> list[str]:
        convert = self.hf.hf.tokenizer.convert_ids_to_tokens
        return [str(convert(token_id)) for token_id in self.placeholders.values()]

    def encode(
        self, texts: Sequence[MediaText], encode_text: Callable[[str], NDArray[np.int32]]
    ) -> list[PromptInput | GraftError]:
        """Tokenise rendered prompts and put their pictures in. encode_text: a whole prompt to ids"""
        encoded: list[PromptInput | GraftError] = []
        for text, items in zip(texts, self.load_each([(x.parts, x.places) for x in texts]), strict=True):
            try:
                encoded.append(
                    items if isinstance(items, GraftError) else self.prompt(*self.ids(text, items, encode_text))
                )
            except Exception as error:
                encoded.append(failure_of(error))
        return encoded

    def ids(
        self,
        text: str,
        items: Sequence[MediaItem],
        encode_text: Callable[[str], NDArray[np.int32]],
        offset: int = 0,
    ) -> tuple[NDArray[np.int32], tuple[Span, ...]]:
        """Tokenise a text with one marker for each of `items`. offset: tokens of the prompt before it"""
        pieces = re.split("|".join(map(re.escape, self._marker_texts)), text)
        if len(pieces) != len(items) + 1:
            raise ConfigError(f"the text has {len(pieces) - 1} markers of pictures for {len(items)} pictures")
        if all(item.alone for item in items):
            ids = self._spliced(encode_text(text), items)
        else:
            whole = "".join(x for pair in zip(pieces, [*(i.text for i in items), ""], strict=True) for x in pair)
            ids = encode_text(whole)
        return self._placed(ids, items, offset)

    def between(self, ids: Sequence[int], parts: Sequence[Part]) -> PromptInput:
        """Return the prompt of the token ids of a text that holds the `text_of` each of `parts`, in order.

        Raises: ConfigError for another number of pictures in the text.
        """
        items, found = self.load(parts), np.asarray(ids, np.int32)
        if all(item.alone for item in items):
            found = self._spliced(found, items)
        elif any(item.alone for item in items):
            raise ConfigError("pictures and videos of this model cannot stand in one text; give one kind")
        return self.prompt(*self._placed(found, items, 0))

    def _placed(
        self, ids: NDArray[np.int32], items: Sequence[MediaItem], offset: int
    ) -> tuple[NDArray[np.int32], tuple[Span, ...]]:
        try:
            return place(ids, items, list(self.placeholders.values()), offset)
        except ValueError as error:
            raise ConfigError(f"the prompt's text holds tokens that stand for pictures: {error}") from error

    def _spliced(self, ids: NDArray[np.int32], items: Sequence[MediaItem]) -> NDArray[np.int32]:
        """Put the ids of items in place of the markers' ids."""
        convert = self.hf.hf.tokenizer.convert_tokens_to_ids
        cuts = np.flatnonzero(np.isin(ids, [convert(marker) for marker in self._marker_texts]))
        if len(cuts) != len(items):
            raise ConfigError(f"the text has {len(cuts)} markers of pictures for {len(items)} pictures")
        pieces: list[NDArray[np.int32]] = []
        last = 0
        for cut, item in zip(cuts, items, strict=True):
            pieces += [ids[last:cut], item.ids]
            last = int(cut) + 1
        return np.concatenate([*pieces, ids[last:]]).astype(np.int32)

    def prompt(self, ids: NDArray[np.int32], spans: tuple[Span, ...]) -> PromptInput:
        """Return the prompt of these ids, with the positions of its tokens."""
        if not spans:
            return PromptInput(ids)
        positions = self._positions.of(ids, spans)
        if positions is None:
            return PromptInput(ids, spans, Layout(both_ways=both_ways(self.model_config)))
        if spans[-1].stop == len(ids):
            raise ConfigError("the prompt ends with a picture; put text after it")
        # generate goes on from the last position of the prompt, not by rope_deltas, which differ behind long videos
        delta = int(positions[0, -1]) + 1 - len(ids)
        return PromptInput(ids, spans, Layout(positions, delta, both_ways(self.model_config)))


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


def media_parts(messages: Iterable[Message]) -> list[Part]:
    """Return the pictures and videos of messages, in order."""
    return [
        part
        for message in messages
        if not isinstance(message.content, str)
        for part in message.content
        if not isinstance(part, TextPart)
    ]


def text_of(media: MediaProcessor, part: Part) -> str:
    """Return the text that stands for a picture among token ids: its marker, or all of its text if that may merge.

    Raises: ConfigError for a picture that cannot be read.
    """
    (item,), kind = media.load([part]), kind_of(part)
    text = media.fragment(kind)
    return text if item.alone else text.replace(media.hf.markers[kind] or "", item.text)


def _processed(hf: HfProcessor, picture: Image, among_several: bool, options: Mapping[str, Any] | None) -> Processed:
    """Process a picture. Raises ConfigError if the processor refuses the picture, or its own options."""
    try:
        return hf.image(picture, among_several=among_several, options=options)
    except Exception as error:  # processors raise any error
        if options is None and not isinstance(error, ValueError):
            raise
        given = "" if options is None else f" with mm_processor_kwargs {shortened(options)}"
        size = f"a picture of {picture.width:,} x {picture.height:,} pixels"
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"the model's processor refuses {size}{given}: {why}; give another size") from error


def _ordered(options: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a picture's own options as texts, in one order."""
    return () if options is None else (json.dumps(options, sort_keys=True),)


def _try_item(media: MediaProcessor, given: tuple[Part, str, bool]) -> MediaItem | GraftError:
    part, place, several = given
    try:
        return media.item(part, among_several=several)
    except ConfigError as error:
        if not place:
            return error
        named = ConfigError(f"{place}: {error}")
        named.__cause__ = error
        return named
    except Exception as error:  # Pillow and processors raise any error
        return failure_of(error)


def _bands(picture: Image) -> Iterator[bytes]:
    """Return the pixels of a picture, some rows at a time: a copy of all would hold Python's lock and its memory."""
    width, height = picture.size
    step = max(1, BAND_PIXELS // width)
    for top in range(0, height, step):
        yield picture.crop((0, top, width, min(top + step, height))).tobytes()


def _digest(fingerprint: bytes, kind: Kind, size: tuple[Any, ...], pixels: Iterable[Any]) -> bytes:
    """Return the identity of a picture or a video of one processor, which `fingerprint` names.

    pixels  in parts, which are contiguous buffers
    """
    tag = f"{kind} {size}".encode()
    lengths = f"{len(tag)} {len(fingerprint)} ".encode()
    digest = hashlib.blake2b(lengths + tag + fingerprint, digest_size=32)
    for part in pixels:
        digest.update(part)
    return digest.digest()


def _why_no_videos() -> str:
    """Return the reason for which processors have no part for videos, where it is a missing package."""
    if importlib.util.find_spec("torchvision") is not None:
        return ""
    return ": transformers' part for videos needs torchvision, the build that belongs to the installed torch"


def kind_of(part: Part) -> Kind:
    return "image" if isinstance(part, ImagePart) else "video"


def _a(part: Part) -> str:
    return "a picture" if isinstance(part, ImagePart) else "a video"
