"""Random models of a real size, and prompts for them. Equal arguments give equal weights."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from graftlm import Runtime
from tests.models import byte_tokenizer, tiny_model

Size = Literal["tiny", "30M", "450M"]

SHAPES: dict[Size, dict[str, Any]] = {
    "tiny": {"max_position_embeddings": 4096},
    "30M": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1408,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "450M": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}


def random_model(size: Size, dtype: torch.dtype = torch.float32, kind: str = "llama") -> PreTrainedModel:
    """Return a Llama shape (or another `kind`) of this size."""
    return tiny_model(kind, **SHAPES[size]).to(dtype)


def runtime(size: Size, dtype: torch.dtype = torch.float32, kind: str = "llama", **options: Any) -> Runtime:
    """Return a loaded runtime on a model of its own, of a `kind` as in `random_model`."""
    built = Runtime(random_model(size, dtype, kind), tokenizer=byte_tokenizer(), **options)
    built.load()
    return built


def random_ids(length: int, seed: int) -> list[int]:
    """Return token ids of plain bytes; different seeds share almost no prefix."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 250, length).tolist()
    return ids


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
"""Sampling parameters that forbid the end tokens: exactly `max_tokens` tokens."""
