"""The scales of keys and values in float8."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from graftlm.core.execution.paged import AttentionCall, AttentionSwitch
from graftlm.kernels.cpu.attention.backend import attend
from graftlm.kernels.kv_store import FP8

if TYPE_CHECKING:
    from graftlm.core.loaded_model import LoadedModel

SAMPLE = 512  # random tokens whose keys and values are measured
MARGIN = 2.0  # headroom above the sample's largest value; values beyond it saturate


def kv_scales(loaded: LoadedModel) -> list[torch.Tensor]:
    """Return the divisors of K and V of each head in float8. -> per layer float32 [2, num_kv_heads].

    Twice the largest value of a sample maps to the largest of float8. Scales are powers of two, so that the division
    does not round.
    """
    largest: dict[int, torch.Tensor] = {}

    def step(call: AttentionCall) -> torch.Tensor:
        peaks = [x[0].abs().amax(dim=(1, 2)).float() for x in (call.k, call.v)]
        largest[loaded.layer_of[call.module]] = torch.stack(peaks)
        group, params = call.q.shape[1] // call.k.shape[1], call.params
        k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
        return attend(call.q, k, v, scale=params.scale, causal=True, softcap=params.softcap).out[0].transpose(0, 1)

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
