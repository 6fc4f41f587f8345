"""A transformers model with random weights, built in memory."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from graftlm.core.model.transformers_lock import building_model, importing_transformers
from graftlm.testing.byte_tokenizer import BOS, EOS, IM_END, PAD, SPECIALS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 256 + 2 * len(SPECIALS)
"""Size of the vocabulary: larger than the byte tokenizer's, as in most published models."""

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}


def random_model(kind: str = "llama", seed: int = 0, **config: Any) -> PreTrainedModel:
    """Build a two-layer model for `byte_tokenizer`, in float32.

    kind    a `model_type` of transformers: "llama", "qwen3", "gpt2", ...
    config  fields of its configuration, in place of those in TINY.

    Equal arguments give equal weights. They are wide enough that greedy decoding meets no ties.
    """
    with importing_transformers():
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    with building_model(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        described = AutoConfig.for_model(kind, **{**TINY, **config})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            described, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0.0, 0.15)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[EOS, IM_END], pad_token_id=PAD)
    return model
