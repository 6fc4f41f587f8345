"""MediaProcessor: rendered messages with pictures and videos to the PromptInput that a vision model computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlm.core.chat.messages import ImagePart, Message, TextPart, VideoPart
from graftlm.core.errors import ConfigError, GraftError, failure_of
from graftlm.core.media.grid_positions import GridPositions
from graftlm.core.media.item_pool import Part
from graftlm.core.media.items import Kind, MediaItem, MediaText, place
from graftlm.core.media.media_items import MediaItems
from graftlm.core.model.transformers_lock import importing_transformers
from graftlm.core.prompt_input import BothWays, Layout, PromptInput, Span

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from graftlm.core.config import EngineConfig


def reads_pictures(config: Any) -> bool:
    """Return True if transformers has a class for this configuration that reads pictures and writes text."""
    if getattr(config, "vision_config", None) is None:
        return False
    with importing_transformers():
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def both_ways(config: Any) -> BothWays:
    """Return the layers in which the tokens of a picture see each other in both directions."""
    if config.model_type == "gemma3":
        return "all"
    return "windowed" if getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision" else ""


class MediaProcessor(MediaItems):
    """Pictures and videos of one model: to items (MediaItems), and to their place in a prompt."""

    def __init__(self, model_config: Any, source: str, config: EngineConfig, given: Any = None) -> None:
        super().__init__(model_config, source, config, given)
        self._positions = GridPositions(model_config)
        self._both_ways = both_ways(model_config)

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
        self,
        texts: Sequence[MediaText],
        encode_texts: Callable[[list[str]], Sequence[NDArray[np.int32] | GraftError]],
    ) -> list[PromptInput | GraftError]:
        """Tokenise rendered prompts and put their pictures in. encode_texts: whole prompts to ids, in one batch"""
        loaded = self.load_each([(x.parts, x.places) for x in texts])
        whole: list[str | GraftError] = []
        for text, items in zip(texts, loaded, strict=True):
            try:
                whole.append(items if isinstance(items, GraftError) else self._whole(text, items))
            except GraftError as error:
                whole.append(error)
        ids_of = iter(encode_texts([text for text in whole if isinstance(text, str)]))
        encoded: list[PromptInput | GraftError] = []
        for given, items in zip(whole, loaded, strict=True):
            found = next(ids_of) if isinstance(given, str) else given
            if isinstance(found, GraftError):
                encoded.append(found)
                continue
            try:
                assert not isinstance(items, GraftError)
                encoded.append(self.prompt(*self._with_items(found, items, 0)))
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
        return self._with_items(encode_text(self._whole(text, items)), items, offset)

    def _whole(self, text: str, items: Sequence[MediaItem]) -> str:
        """Return the text to tokenise: with its markers, or with pictures' texts where they may change or merge."""
        pieces = re.split("|".join(map(re.escape, self._marker_texts)), text)
        if len(pieces) != len(items) + 1:
            raise ConfigError(f"the text has {len(pieces) - 1} markers of pictures for {len(items)} pictures")
        if self._expands(items):
            return self.hf.expanded(str(text), [item.form for item in items if item.form is not None])
        if all(item.alone for item in items):
            return str(text)
        return "".join(x for pair in zip(pieces, [*(i.text for i in items), ""], strict=True) for x in pair)

    def _with_items(
        self, ids: NDArray[np.int32], items: Sequence[MediaItem], offset: int
    ) -> tuple[NDArray[np.int32], tuple[Span, ...]]:
        """Put items into the ids of the text that `_whole` returned."""
        spliced = all(item.alone for item in items) and not self._expands(items)
        return self._placed(self._spliced(ids, items) if spliced else ids, items, offset)

    def _expands(self, items: Sequence[MediaItem]) -> bool:
        """Return True if the processor writes the text of these items as a whole. Videos keep texts of their own."""
        least = self.hf.least_expanded
        return least is not None and len(items) >= least and all(item.form is not None for item in items)

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
            return PromptInput(ids, spans, Layout(both_ways=self._both_ways))
        if spans[-1].stop == len(ids):
            raise ConfigError("the prompt ends with a picture; put text after it")
        # generate goes on from the last position of the prompt, not by rope_deltas, which differ behind long videos
        delta = int(positions[0, -1]) + 1 - len(ids)
        return PromptInput(ids, spans, Layout(positions, delta, self._both_ways))


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


def kind_of(part: Part) -> Kind:
    return "image" if isinstance(part, ImagePart) else "video"


def _a(part: Part) -> str:
    return "a picture" if isinstance(part, ImagePart) else "a video"
