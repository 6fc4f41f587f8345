"""In which dtype KV is kept, and by what it is divided to fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError
from graftlm.core.paged import AttentionCall, AttentionSwitch
from graftlm.kernels.torch_attention import attend

if TYPE_CHECKING:
    from graftlm.core.model import LoadedModel

FP8 = torch.float8_e4m3fn
SAMPLE = 512  # random tokens whose keys and values are looked at
MARGIN = 2.0  # how much larger others may be; beyond it they are cut off


def kv_dtype(loaded: LoadedModel, cache: CacheConfig) -> torch.dtype:
    """The dtype of the KV store. ConfigError if the configuration asks for one that the model's lane cannot have."""
    if cache.dtype == "auto":
        return loaded.dtype
    if loaded.lane != "paged" or loaded.device.type != "cuda":
        where = "runs in the serial lane" if loaded.lane != "paged" else f"runs on {loaded.device}"
        raise ConfigError(
            f"CacheConfig.dtype is {cache.dtype!r}, but {loaded.name} {where}; KV in float8 is for models in the paged "
            "lane on a GPU: leave it out"
        )
    return FP8


def kv_bytes_per_token(loaded: LoadedModel, cache: CacheConfig) -> int:
    """Bytes that one token takes in the KV pool; an estimate in the serial lane."""
    dtype = kv_dtype(loaded, cache)
    if dtype is loaded.dtype:
        return loaded.bytes_per_token
    return sum(layer.num_bytes(dtype) for layer in loaded.kv_layout)


def kv_scales(loaded: LoadedModel) -> list[torch.Tensor]:
    """What K and V of each head are divided by in float8. -> per layer float32 [2, num_kv_heads].

    The largest of a sample, twice over, becomes the largest that float8 can hold. Powers of two, so that scaling
    itself rounds nothing.
    """
    largest: dict[int, torch.Tensor] = {}

    def step(call: AttentionCall) -> torch.Tensor:
        peaks = [x[0].abs().amax(dim=(1, 2)).float() for x in (call.k, call.v)]
        largest[loaded.layer_of[call.module]] = torch.stack(peaks)
        group = call.q.shape[1] // call.k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
        return attend(call.q, k, v, scale=call.scale, causal=True, softcap=call.softcap).out[0].transpose(0, 1)

    length = min(SAMPLE, loaded.max_model_len)
    drawn = np.random.default_rng(2).integers(0, max(min(loaded.vocab_size, 30_000), 2), length)
    ids = torch.from_numpy(drawn)[None].to(loaded.device)
    with torch.inference_mode(), AttentionSwitch(loaded.model)(step):
        loaded.model(input_ids=ids, position_ids=torch.arange(length, device=ids.device)[None], use_cache=False)
    limit = torch.finfo(FP8).max
    return [
        torch.exp2(torch.ceil(torch.log2((largest[layer] * MARGIN / limit).clamp_min(math.ldexp(1.0, -20)))))
        for layer in range(len(loaded.layers))
    ]
