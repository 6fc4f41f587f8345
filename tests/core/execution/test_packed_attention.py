from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from graftlm.core.execution.packed_attention import IMPLEMENTATION, PackedAttention, packed_attention
from graftlm.testing.random_vision import random_vision_model


def test_each_sequence_of_a_packed_one_sees_itself_alone() -> None:
    q, k, v = torch.randn(3, 1, 2, 11, 8).unbind(0)
    offsets = torch.tensor([0, 3, 3, 4, 7, 11], dtype=torch.int32)
    found, _ = packed_attention(nn.Module(), q, k, v, scaling=0.3, cu_seq_lens_q=offsets)
    parts = [slice(0, 3), slice(3, 4), slice(4, 7), slice(7, 11)]
    expected = [scaled_dot_product_attention(q[:, :, s], k[:, :, s], v[:, :, s], scale=0.3) for s in parts]
    torch.testing.assert_close(found, torch.cat(expected, 2).transpose(1, 2))


def test_an_encoder_is_packed_for_the_time_of_a_call_and_a_decoder_never() -> None:
    model, _ = random_vision_model("qwen2_5_vl")
    encoder, decoder = model.config.vision_config, model.config.text_config
    before = encoder._attn_implementation
    with PackedAttention(model)():
        assert encoder._attn_implementation == IMPLEMENTATION
        assert decoder._attn_implementation != IMPLEMENTATION
    assert encoder._attn_implementation == before
    model, _ = random_vision_model("llava")
    with PackedAttention(model)():
        assert model.config.vision_config._attn_implementation != IMPLEMENTATION
