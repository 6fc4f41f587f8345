"""Questions about pictures, and the answers of transformers to them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from graftlm.testing.random_vision import END


def question(text: str, *pictures: Any) -> list[dict[str, Any]]:
    """Return one user message with pictures before its text."""
    parts = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def reference(
    model: Any, processor: Any, messages: list[dict[str, Any]], max_tokens: int = 8, **options: Any
) -> tuple[list[int], int]:
    """Return the tokens that transformers generates, without the end, and the number of the prompt's tokens.

    options  of the processor
    """
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    pictures = [part["image"] for content in contents for part in content if "image" in part]
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    nested = type(processor).__name__ in ("Idefics3Processor", "SmolVLMProcessor", "LlavaOnevisionProcessor")
    batch = processor(
        images=([pictures] if nested else pictures) if pictures else None, text=[text], return_tensors="pt", **options
    )
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None  # of the request before
    num_prompt = batch["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)[0, num_prompt:].tolist()
    return written(ids), num_prompt


def written(ids: Iterable[int]) -> list[int]:
    """Return the ids before the end of the answer."""
    found = list(ids)
    return found[: found.index(END)] if END in found else found
