"""The self-test of a vision model's pictures: steps with pictures, beside the model's own forward.

It runs once a load of a vision model, for two pictures of a few dozen tokens. A model that differs refuses pictures
with the reason, and answers texts as before.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graftlm.core.chat.messages import ImagePart, Message, TextPart
from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.execution.grid_tables import GridTables
from graftlm.core.execution.media_rows import MediaRows
from graftlm.core.execution.packed_attention import attention_by
from graftlm.core.execution.vision import MOST_NUMBERS, Vision
from graftlm.core.media.processor import both_ways
from graftlm.core.model.qualify import TOLERANCE, AttentionFactory, probe_plan, probe_runner, relative_error
from graftlm.core.prompt_input import PromptInput
from graftlm.kernels.kv_store import allocate_kv
from graftlm.kernels.wire_plan import Extent, WirePlan

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel
    from graftlm.core.media.items import MediaItem

_SIZES = ((80, 60), (60, 112))
"""Width and height in pixels of the two pictures: small, and of different numbers of tokens in most models."""

_ROUNDINGS = 2.0
"""Error that is accepted, in differences between two of the model's own attention implementations."""

_TABLES_LIMIT = 1e-2
"""Error of embeddings with tables that the host computed, in half precision."""

_LARGEST_LIMIT = 0.2
"""A wrong position or embedding changes logits by more, whatever the rounding."""

_GPU_SHARE = 50
"""The default of `media_cache_bytes` on a GPU: its memory divided by this."""

_CPU_BYTES = 1 << 28


@dataclass(frozen=True)
class PictureReference:
    """Two prompts with a picture each, and their logits by the model's own forward before any replacement.

    rounding  relative difference of logits between two attention implementations of that forward
    reason    why there are none
    """

    prompts: tuple[PromptInput, ...] = ()
    logits: tuple[torch.Tensor, ...] = ()
    rounding: float = 0.0
    reason: str | None = None

    def limit(self, dtype: torch.dtype) -> float:
        """Return the relative error of logits that rounding explains, in a model of any depth."""
        tolerance = TOLERANCE.get(dtype, 6e-2)
        return max(tolerance, min(_ROUNDINGS * self.rounding, _LARGEST_LIMIT))

    @classmethod
    def of(cls, loaded: LoadedModel) -> PictureReference:
        """Run the model on two pictures; without logits and with the reason if that fails."""
        media = loaded.tokenizer.media if loaded.tokenizer is not None else None
        if media is None:
            return cls(reason=f"{loaded.name} reads text only; load a vision model")
        try:
            prompts = tuple(_prompt(loaded, index, size) for index, size in enumerate(_SIZES))
            logits = tuple(_own_logits(loaded, prompt) for prompt in prompts)
            return cls(prompts, logits, _rounding(loaded, prompts[0], logits[0]))
        except ConfigError as error:
            return cls(reason=str(error))
        except Exception as error:  # models and processors raise any error
            why = f"{type(error).__name__}: {str(error)[:200]}"
            return cls(reason=f"{loaded.name} reads no pictures here: its own forward of a picture fails: {why}")


def add_vision(
    loaded: LoadedModel, reference: PictureReference, attention_factory: AttentionFactory, config: EngineConfig
) -> None:
    """Give a model that reads pictures its encoder, or the reason for which pictures are refused."""
    loaded.no_pictures = reference.reason
    if reference.reason is not None:
        return
    if loaded.lane == "serial":
        loaded.no_pictures = f"{loaded.name} reads no pictures in the serial lane: {loaded.lane_reason}"
        return
    memory = torch.cuda.get_device_properties(loaded.device).total_memory if loaded.device.type == "cuda" else 0
    max_bytes = config.media_cache_bytes or (memory // _GPU_SHARE if memory else _CPU_BYTES)
    difference = _added(loaded, max_bytes) or _difference(loaded, reference, attention_factory)
    if difference is not None or loaded.vision is None:
        loaded.vision = None
        loaded.no_pictures = f"{loaded.name} reads no pictures here: {difference}"
        return
    _try_tables(loaded.vision, reference, loaded.dtype)
    loaded.vision.batches = not config.strict and _batches_agree(loaded, reference)
    assert loaded.tokenizer is not None and loaded.tokenizer.media is not None
    loaded.tokenizer.media.computes_in(loaded.vision.dtype)
    loaded.vision.forget()
    if loaded.device.type == "cuda":
        try:
            largest = loaded.tokenizer.media.largest()
            loaded.vision.work_bytes = _work_bytes(loaded.vision, largest)
            loaded.vision.most_numbers = max(MOST_NUMBERS, loaded.vision.size_of(largest))
        except torch.OutOfMemoryError:
            loaded.vision = None
            loaded.no_pictures = (
                f"{loaded.name} reads no pictures here: the largest does not fit beside the weights; lower "
                f"MediaLimits.max_image_pixels ({config.media.max_image_pixels:,}) or the processor's own limit"
            )
        except Exception as failure:  # encoders raise any error
            loaded.vision = None
            why = f"{type(failure).__name__}: {str(failure)[:200]}"
            loaded.no_pictures = f"{loaded.name} reads no pictures here: its encoder fails for the largest: {why}"


def _work_bytes(vision: Vision, largest: MediaItem) -> int:
    """Measure the memory that the encoder takes for a picture of the most pixels, or for a full call of small ones."""
    device: Any = vision.model.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        vision.encode([largest])
    peak = torch.cuda.max_memory_allocated(device) - before
    return int(peak * max(1.0, MOST_NUMBERS / vision.size_of(largest)))


def _try_tables(vision: Vision, reference: PictureReference, dtype: torch.dtype) -> None:
    """Give the encoder tables of grids, unless its embeddings differ with them."""
    items = [prompt.spans[0].values.item for prompt in reference.prompts]
    with torch.inference_mode():
        own = [vision.encode([item])[0].layers for item in items]
        vision.tables = GridTables(vision.model)
        try:
            found = [vision.encode([item])[0].layers for item in items]
        except Exception:  # encoders raise any error for arguments that they do not take
            vision.tables = None
            return
    pairs = (pair for both in zip(own, found, strict=True) for pair in zip(*both, strict=True))
    if max(relative_error(*pair) for pair in pairs) >= min(TOLERANCE.get(dtype, _TABLES_LIMIT), _TABLES_LIMIT):
        vision.tables = None


def _batches_agree(loaded: LoadedModel, reference: PictureReference) -> bool:
    """Return True if pictures that are encoded in one call have the embeddings of each alone."""
    vision, media = loaded.vision, loaded.tokenizer.media if loaded.tokenizer is not None else None
    assert vision is not None and media is not None
    items = [prompt.spans[0].values.item for prompt in reference.prompts]
    items.append(media.item(_picture(len(items), _SIZES[0])))
    vision.batches, limit = True, reference.limit(loaded.dtype)
    try:
        with torch.inference_mode():
            for batch in vision.batched(items):
                together = [features.layers for features in vision.encode(batch)]
                alone = [vision.encode([item])[0].layers for item in batch]
                pairs = [pair for both in zip(together, alone, strict=True) for pair in zip(*both, strict=True)]
                if len(batch) > 1 and max(relative_error(*pair) for pair in pairs) >= limit:
                    return False
    except Exception:  # encoders raise any error for what they do not take
        return False
    return True


def _picture(seed: int, size: tuple[int, int]) -> ImagePart:
    from graftlm.core.media.pixels import import_pillow

    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    return ImagePart(import_pillow().fromarray(pixels))


def _prompt(loaded: LoadedModel, index: int, size: tuple[int, int]) -> PromptInput:
    assert loaded.tokenizer is not None
    from graftlm.core.text.processor import TextProcessor

    part = _picture(index, size)
    if loaded.tokenizer.has_chat_template:
        return TextProcessor(loaded.tokenizer).encode([Message("user", (TextPart("What is "), part, TextPart("?")))])
    media = loaded.tokenizer.media
    assert media is not None
    text = f"What is {media.hf.fragment('image')}?"
    encode = loaded.tokenizer.encode
    ids, spans = media.ids(text, [media.item(part)], lambda given: np.array(encode(given), np.int32))
    return media.prompt(ids, spans)


def _own_logits(loaded: LoadedModel, prompt: PromptInput) -> torch.Tensor:
    """Compute logits [num_tokens, vocab_size] by the model's own forward, pixels to logits."""
    ids, types = prompt.ids.astype(np.int64), np.zeros(len(prompt), np.int64)
    given: dict[str, Any] = {}
    for span in prompt.spans:
        item = span.values.item
        ids[span.start : span.stop] = item.placeholder
        types[span.start : span.stop] = 1
        given.update(item.tensors())
    dtype = getattr(loaded.model, "dtype", loaded.dtype)
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}
    for name in ("token_type_ids", "mm_token_type_ids"):
        given[name] = torch.from_numpy(types)[None]
    given["input_ids"] = torch.from_numpy(ids)[None]
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    known = inspect.signature(loaded.model.forward).parameters
    given = {name: value.to(loaded.device) for name, value in given.items() if name in known}
    inner: Any = loaded.model
    if both_ways(inner.config) == "windowed":
        given["attention_mask"] = _masks(inner, given)
    if hasattr(getattr(inner, "model", None), "rope_deltas"):
        inner.model.rope_deltas = None
    with torch.inference_mode():
        logits: torch.Tensor = inner(**given, use_cache=False).logits[0]
    if hasattr(getattr(inner, "model", None), "rope_deltas"):
        inner.model.rope_deltas = None
    return logits


def _masks(model: Any, given: dict[str, Any]) -> Any:
    """Return the masks that a model makes for its own `generate`: of Gemma 4's, the forward's differ in some versions.

    transformers 5.24 lets pictures of Gemma4Unified (12B) see both ways in all layers, beyond the window, if the
    forward makes the masks; made for `generate` with a static cache they are those of the published model.
    """
    ids = given["input_ids"]
    return model.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(*ids.shape, 0, dtype=model.dtype, device=ids.device),
        attention_mask=given["attention_mask"],
        past_key_values=None,
        position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
        mm_token_type_ids=given["mm_token_type_ids"],
        is_first_iteration=True,
    )


def _rounding(loaded: LoadedModel, prompt: PromptInput, logits: torch.Tensor) -> float:
    """Return how far rounding alone moves logits: their relative difference with attention computed by plain products.

    0 in float32, and for a model without a second implementation.
    """
    if loaded.dtype == torch.float32:
        return 0.0
    modules: list[Any] = [module for module in loaded.model.modules() if hasattr(module, "config")]
    configs = {id(module.config): module.config for module in modules}.values()
    try:
        with attention_by("eager", [one for one in configs if hasattr(one, "_attn_implementation_internal")]):
            return relative_error(_own_logits(loaded, prompt), logits)
    except Exception:  # models without this implementation raise any error
        return 0.0


def _added(loaded: LoadedModel, max_bytes: int) -> str | None:
    """Give a model its encoder. -> the reason for which it cannot be used; None if it can"""
    try:
        loaded.vision = Vision(loaded.model, max_bytes)
    except Exception as failure:  # models of another form raise any error
        return f"its parts have other names: {type(failure).__name__}: {str(failure)[:200]}"
    return None


def _difference(loaded: LoadedModel, reference: PictureReference, attention_factory: AttentionFactory) -> str | None:
    """Return the difference of ragged steps with pictures from the model's own forward; None if they agree."""
    limit = reference.limit(loaded.dtype)
    try:
        found = _ragged(loaded, reference.prompts, attention_factory)
    except Exception as failure:
        return f"a step with pictures fails: {type(failure).__name__}: {str(failure)[:200]}"
    error = max(map(relative_error, found, reference.logits))
    if error < limit:
        return None
    return f"a step with pictures differs from the model's own forward by {error:.1e} (limit {limit:.0e})"


def _ragged(
    loaded: LoadedModel, prompts: tuple[PromptInput, ...], attention_factory: AttentionFactory
) -> list[torch.Tensor]:
    """Compute the logits of both prompts in two steps, the first of which ends within the pictures if it may."""
    cuts = [_cut(prompt) for prompt in prompts]
    lengths = list(map(len, prompts))
    store = allocate_kv(loaded.kv_layout, sum(lengths), loaded.dtype, loaded.device)
    runner = probe_runner(loaded, attention_factory(store), len(prompts))
    places = tuple([Extent(sum(lengths[:i]), sum(lengths[: i + 1]))] for i in range(len(prompts)))
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for pieces in ([(0, cut) for cut in cuts], list(zip(cuts, lengths, strict=True))):
        plan = _with_pictures(probe_plan([p.ids.tolist() for p in prompts], places, pieces), prompts, pieces)
        logits, start = runner.forward(plan), 0
        for part, (first, last) in zip(parts, pieces, strict=True):
            part.append(logits[start : start + last - first].clone())
            start += last - first
    return [torch.cat(part) for part in parts]


def _cut(prompt: PromptInput) -> int:
    span = prompt.spans[0]
    both_ways = prompt.layout is not None and prompt.layout.both_ways
    return span.stop if both_ways or span.stop - span.start < 2 else (span.start + span.stop) // 2


def _with_pictures(plan: WirePlan, prompts: tuple[PromptInput, ...], pieces: list[tuple[int, int]]) -> WirePlan:
    media, start = MediaRows(), 0
    ids, positions = [], []
    for prompt, (first, last) in zip(prompts, pieces, strict=True):
        of_row = media.add(prompt, prompt.ids[first:last], first, start)
        ids.append(of_row[0])
        positions.append(of_row[1])
        start += last - first
    joined = replace(plan, input_ids=np.concatenate(ids, dtype=np.int64), positions=np.concatenate(positions))
    return media.written(joined)
