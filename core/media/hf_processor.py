"""HfProcessor: a model's processor of transformers, applied to one picture or video at a time."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.hub import only_local, why_not
from graftlm.core.media.items import Form, Kind, is_bytes, spread
from graftlm.core.media.picture_options import PictureOptions
from graftlm.core.media.pixels import LARGE_PIXELS, import_pillow, pixels_of
from graftlm.core.media.uncopied import without_copies
from graftlm.core.model.transformers_lock import importing_transformers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from graftlm.core.media.video import LoadedVideo

_OF_THE_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"})
"""Outputs of a processor that describe the text, not the picture."""

_NESTED = ("SmolVLMProcessor", "Idefics3Processor")
"""Processors that take a list of pictures for each text."""

_PLAIN = ("Qwen2VLImageProcessor",)
"""Image processors that never pad: each value is that of a pixel's byte."""

_TRIED = ((700, 1500), (1100, 300), (40, 60))
"""Height and width of pictures that are processed both ways before others are processed in another way than theirs."""

_MARKERS = {"image": ("image_token", "boi_token", "fake_image_token"), "video": ("video_token",)}
"""Attributes of processors: the text that a chat template writes for a picture or a video."""


class Processed(NamedTuple):
    """The output of a processor for one picture or video.

    text    takes the place of the marker
    ids     int32, the ids of `text`
    inputs  of the model's encoder, by name
    """

    text: str
    ids: NDArray[np.int32]
    inputs: dict[str, Any]


def load_hf_processor(source: str, *, trust_remote_code: bool = False) -> Any:
    """Load the processor beside a model. Raises ModelError with the reason and the remedy."""
    try:
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": only_local(source)}
        with importing_transformers():
            from transformers import AutoProcessor

            try:
                processor = AutoProcessor.from_pretrained(source, **options)
            except ImportError as error:
                if "torchvision" not in str(error).lower():
                    raise
                processor = _without_videos(source, options)
    except Exception as error:  # odd files raise any error in transformers
        raise ModelError(f"its processor cannot be loaded: {_remedy(error) or why_not(source, error)}") from error
    if not hasattr(processor, "image_processor"):
        raise ModelError("there is no preprocessor_config.json or processor_config.json beside the model")
    return processor


def _remedy(error: Exception) -> str | None:
    """Return the remedy for a missing package."""
    text = str(error)
    if isinstance(error, ImportError) and "torchvision" in text.lower():
        return "this model's pictures need torchvision; install the build of torchvision that belongs to this torch"
    if isinstance(error, ImportError) and ("PIL" in text or "vision" in text.lower() or "illow" in text):
        return "pictures need Pillow, which is not installed; pip install 'graftlm[images]'"
    return None


def _without_videos(source: str, options: dict[str, Any]) -> Any:
    """Load a processor without its part for videos, which needs torchvision."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    described = _described(source, options)
    name = described.pop("processor_class", None)
    cls = getattr(transformers, name or "", None)
    if cls is None or getattr(cls, "_backends", None):
        raise ImportError(f"{name} needs torchvision")
    # transformers looks classes of video processors up to check an argument, and does not find them
    cls = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda self, name, given: type(given)})
    parts: dict[str, Any] = {"video_processor": None}
    parts["image_processor"] = AutoImageProcessor.from_pretrained(source, **options)
    parts["tokenizer"] = AutoTokenizer.from_pretrained(source, **options)
    settings = {key: value for key, value in described.items() if not isinstance(value, dict)}
    known = {name: settings[name] for name in _parameters(cls) if name in settings}
    if "feature_extractor" in _parameters(cls):
        parts["feature_extractor"] = None
    template = getattr(parts["tokenizer"], "chat_template", None) or settings.get("chat_template")
    return cls(**parts, **{**known, "chat_template": template})


def _parameters(cls: type) -> list[str]:
    return list(inspect.signature(cls).parameters)


def _described(source: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a processor from its files."""
    from transformers.utils.hub import cached_file

    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "tokenizer_config.json", "processor_config.json"):
        path = cached_file(
            source, name, local_files_only=options["local_files_only"], _raise_exceptions_for_missing_entries=False
        )
        if path is not None and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                read = json.load(file)
            found = {**found, **read} if name == "processor_config.json" else {**read, **found}
    return found


class _Recorder:
    """A tokenizer that keeps the text which a processor has it encode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.text = tokenizer, ""

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        self.text = text if isinstance(text, str) else text[0]
        return self.tokenizer(text, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def own_tokenizer(tokenizer: Any) -> Any:
    """Return a copy of a processor's tokenizer: the calls of a processor set padding, and another thread encodes."""
    own = copy.deepcopy(tokenizer)
    backend = getattr(own, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.no_truncation()
    return own


class HfProcessor:
    """A processor of transformers: one call for each picture, so that no picture's inputs depend on its neighbours.

    options  of every picture, such as {"max_pixels": 602112}. Raises ConfigError for an unknown one.
    """

    def __init__(self, processor: Any, options: Mapping[str, Any]) -> None:
        self.hf = copy.copy(processor)
        self.hf.tokenizer = own_tokenizer(processor.tokenizer)
        self.options = PictureOptions(processor.image_processor, options)
        self.markers: dict[Kind, str | None] = {"image": self._marker("image"), "video": self._marker("video")}
        self._fragments: dict[Kind, str] = {}
        parts = [getattr(processor, name, None) for name in ("image_processor", "video_processor")]
        described = [[type(part).__name__, str(part.to_dict())] for part in parts if part is not None]
        self.fingerprint = json.dumps([type(processor).__name__, described, repr(sorted(options.items()))]).encode()

    @cached_property
    def levels(self) -> Any:
        """The encoder's input for each byte of a color, float32 [3, 256]; None if pixels are processed whole.

        Bytes are a quarter of the processor's floats, and take a third less time; the device spreads them.
        """
        if type(self.hf.image_processor).__name__.removesuffix("Pil").removesuffix("Fast") not in _PLAIN:
            return None
        try:
            return _levels(self.hf.image_processor)
        except Exception:  # processors raise any error for options that they do not take
            return None

    @property
    def several_differ(self) -> bool:
        """Whether a picture among several has other inputs than one that is alone in its prompt."""
        return "LlavaOnevision" in type(self.hf).__name__

    @cached_property
    def least_expanded(self) -> int | None:
        """The least number of pictures of a text that is expanded as a whole; None if each picture's text is its own.

        Some processors number the pictures of a prompt (MiniCPM-V), or write a space after one (Idefics2).
        """
        marker, ends, pictures = self.markers["image"] or "", ("a", "b c", "d"), list(_neighbours())
        try:
            texts = [self.image(picture, among_several=self.several_differ).text for picture in pictures]
            for count in (2,) if self.several_differ else (1, 2):
                joined = "".join(x for pair in zip(ends, texts[:count], strict=False) for x in pair) + ends[count]
                forms = [Form(*picture.size, None) for picture in pictures[:count]]
                if self.expanded(marker.join(ends[: count + 1]), forms) != joined:
                    return count
        except Exception:  # a processor of another form raises any error
            return None
        return None

    def expanded(self, text: str, forms: Sequence[Form]) -> str:
        """Return a text whose markers stand for pictures of these forms as the processor writes it.

        Raises ConfigError for options that differ.
        """
        options = forms[0].options
        if any(form.options != options for form in forms):
            raise ConfigError("the pictures of a prompt have several mm_processor_kwargs; give this model's the same")
        pictures = [import_pillow().new("RGB", form[:2]) for form in forms]
        nested = type(self.hf).__name__ in _NESTED or self.several_differ
        given: dict[str, Any] = {"images": [pictures] if nested else pictures}
        if options := {**(self.options.of_runtime if options is None else options)}:
            given["images_kwargs"] = options
        return self._call(given, text, self.hf.image_processor).text

    def _render(self, content: list[dict[str, Any]]) -> str:
        return str(self.hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False))

    def _marker(self, kind: Kind) -> str | None:
        """Return the text that the chat template writes for a picture or a video; None if it writes none."""
        names = (getattr(self.hf, name, None) for name in _MARKERS[kind])
        tokens = [token for token in names if isinstance(token, str) and token]
        if not getattr(self.hf, "chat_template", None):
            return tokens[0] if tokens else None
        text = self._render([{"type": kind}, {"type": "text", "text": "x"}])
        plain = self._render([{"type": "text", "text": "x"}])
        return next((token for token in tokens if text.count(token) > plain.count(token)), None)

    def fragment(self, kind: Kind) -> str:
        """Return the text that the chat template writes for a picture or a video inside a user's turn."""
        if kind not in self._fragments:
            text = self._render([{"type": kind}, {"type": "text", "text": "x y z"}])
            plain = self._render([{"type": "text", "text": "x y z"}])
            at = plain.index("x y z")
            self._fragments[kind] = text[at : len(text) - (len(plain) - at)] or self.markers[kind] or ""
        return self._fragments[kind]

    def image(
        self,
        picture: Image,
        *,
        among_several: bool = False,
        options: Mapping[str, Any] | None = None,
        pixels: NDArray[np.uint8] | None = None,
    ) -> Processed:
        """Process a picture of mode RGB.

        options  of `options.of_request`; None: those of every picture
        pixels   those of the picture [height, width, 3], if somebody has them
        """
        if options is None and not among_several and self._makes_patches:
            return self._of_patches(picture, pixels)
        if picture.width * picture.height > LARGE_PIXELS and not among_several:
            with suppress(Exception):  # a step takes arrays alone, or refuses the picture, as it does below
                return self._image(picture, self._uncopied, options)
        return self._image(picture, self.hf.image_processor, options, among_several)

    @cached_property
    def _makes_patches(self) -> bool:
        """Whether `_of_patches` is what the processor makes of pictures without options, tried with some."""
        if self.levels is None or self.options.of_runtime:
            return False
        try:
            return all(_are_equal(self._of_patches(one), self._image(one, self.hf.image_processor)) for one in _tried())
        except Exception:  # a processor of another form raises any error
            return False

    def _of_patches(self, picture: Image, pixels: NDArray[np.uint8] | None = None) -> Processed:
        inputs = _patches(self.hf.image_processor, pixels_of(picture) if pixels is None else pixels)
        count = int(inputs["image_grid_thw"].prod()) // self.hf.image_processor.merge_size**2
        text = self.markers["image"] or ""
        ids = np.full(count, self.hf.tokenizer.convert_tokens_to_ids(text), np.int32)
        return Processed(text * count, ids, inputs)

    def _image(
        self,
        picture: Image,
        image_processor: Any,
        options: Mapping[str, Any] | None = None,
        among_several: bool = False,
    ) -> Processed:
        count = 2 if among_several else 1
        images: list[Any] = [picture] * count
        nested = type(self.hf).__name__ in _NESTED or among_several
        text = (self.markers["image"] or "") * count
        given: dict[str, Any] = {"images": [images] if nested else images}
        bytes_alone = {} if self.levels is None else {"do_rescale": False, "do_normalize": False}
        if options := {**(self.options.of_runtime if options is None else options), **bytes_alone}:
            given["images_kwargs"] = options
        found = self._call(given, text, image_processor)
        return _first_of_two(found) if among_several else found

    @cached_property
    def _uncopied(self) -> Any:
        """The image processor that takes pictures uncopied, if it makes the same of some; else the usual one."""
        usual = self.hf.image_processor
        own = without_copies(usual)
        if own is not usual:
            for picture in _tried():
                try:
                    same = _are_equal(self._image(picture, own), self._image(picture, usual))
                except Exception:  # a step takes arrays alone
                    same = False
                if not same:
                    return usual
        return own

    def video(self, video: LoadedVideo) -> Processed:
        """Process the sampled frames of a video."""
        from transformers.video_utils import VideoMetadata

        _, height, width, _ = video.frames.shape
        metadata = VideoMetadata(
            total_num_frames=video.num_total,
            fps=video.fps,
            width=width,
            height=height,
            duration=video.num_total / video.fps,
            frames_indices=video.indices.tolist(),
        )
        options = {"video_metadata": [metadata], "do_sample_frames": False, "return_metadata": True}
        given = {"videos": [video.frames], "videos_kwargs": options}
        return self._call(given, self.markers["video"] or "", self.hf.image_processor)

    def _call(self, given: dict[str, Any], text: str, image_processor: Any) -> Processed:
        hf = copy.copy(self.hf)
        hf.image_processor = image_processor
        hf.tokenizer = recorder = _Recorder(hf.tokenizer)
        batch = hf(text=[text], return_tensors="pt", add_special_tokens=False, **given)
        inputs = {k: v for k, v in batch.items() if k not in _OF_THE_TEXT and hasattr(v, "shape")}
        return Processed(recorder.text, batch["input_ids"][0].numpy().astype(np.int32), inputs)


def _neighbours() -> Iterator[Image]:
    for size in ((80, 60), (60, 112)):
        yield import_pillow().new("RGB", size)


def _tried() -> Iterator[Image]:
    rng = np.random.default_rng(0)
    for shape in _TRIED:
        yield import_pillow().fromarray(rng.integers(0, 256, (*shape, 3), np.uint8))


def _levels(image_processor: Any) -> Any:
    """Return the table of a processor's bytes to its values; None if it does not give just these values."""
    import torch
    from PIL import Image as Pillow

    sides = np.arange(16 * 16).reshape(16, 16), np.random.default_rng(0).integers(0, 256, (60, 80, 3))
    table = torch.zeros(3, 256, dtype=torch.float32)
    for number, pixels in enumerate(sides):
        colors = np.broadcast_to(pixels[..., None], (16, 16, 3)) if pixels.ndim == 2 else pixels
        picture = Pillow.fromarray(colors.astype(np.uint8))
        if not number:  # each pixel becomes a patch's worth of its value: nothing is resized
            factor = image_processor.patch_size * image_processor.merge_size
            picture = picture.resize((16 * factor, 16 * factor), Pillow.Resampling.NEAREST)
        options = {"images": [picture], "return_tensors": "pt", "do_resize": bool(number)}
        whole = image_processor(**options)["pixel_values"]
        found = image_processor(**options, do_rescale=False, do_normalize=False)["pixel_values"]
        if not is_bytes(found):
            return None
        if not number:
            for color, (bytes_of, values) in enumerate(zip(found.chunk(3, 1), whole.chunk(3, 1), strict=True)):
                table[color, bytes_of.flatten().long()] = values.flatten()
        if not torch.equal(spread(found, table), whole):
            return None
    return table


def _patches(image_processor: Any, picture: NDArray[np.uint8]) -> dict[str, Any]:
    """Return the encoder's inputs of a picture, uint8 [height, width, 3], in a fifth of the processor's time.

    Its Python code around a picture holds Python's lock, and it copies the pixels twice in a slow order. Here its own
    `resize` takes them as Pillow decoded them.

    -> pixel_values uint8 [num_patches, 3 * times * side * side], image_grid_thw int64 [1, 3]
    Raises any error for a processor of another kind, and ValueError for a picture that the processor refuses.
    """
    import torch
    from transformers.image_utils import SizeDict

    own = image_processor
    side, merged, times = own.patch_size, own.merge_size, own.temporal_patch_size
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None]
    if own.do_resize:
        size = own.size if isinstance(own.size, SizeDict) else SizeDict(**own.size)
        pixels = own.resize(pixels, size, resample=own.resample, factor=side * merged)
    height, width = (length // side for length in pixels.shape[-2:])
    blocks = pixels[0].view(3, height // merged, merged, side, width // merged, merged, side)
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).contiguous().flatten(0, 3)  # [num_patches, 3, side, side]
    repeated = patches[:, :, None].expand(-1, -1, times, -1, -1).reshape(height * width, -1)
    return {"pixel_values": repeated, "image_grid_thw": torch.tensor([[1, height, width]])}


def _are_equal(one: Processed, other: Processed) -> bool:
    texts = one.text == other.text and np.array_equal(one.ids, other.ids) and one.inputs.keys() == other.inputs.keys()
    return texts and all(np.array_equal(x, other.inputs[name]) for name, x in one.inputs.items())


def _first_of_two(found: Processed) -> Processed:
    """Return the first of two equal pictures that were processed together."""
    half, ids = len(found.text) // 2, found.ids[: len(found.ids) // 2]
    inputs = {k: v if k == "batch_num_images" else v[: max(1, len(v) // 2)] for k, v in found.inputs.items()}
    return Processed(found.text[:half], ids, inputs)
