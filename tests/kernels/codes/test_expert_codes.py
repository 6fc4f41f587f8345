"""Experts with quantised weights compute what experts with their values do, and hold no values between calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graftlm.core.model.quantised.rounding import rounded
from graftlm.kernels.codes.expert_codes import ExpertCodes, codes_of, put_experts
from tests.models import tiny_model

NAMES = "gate_up_proj", "down_proj"


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
@torch.no_grad()
def test_experts_hold_codes_alone_and_compute_with_their_values(kind: str) -> None:
    model, plain = (tiny_model(kind, hidden_size=64, moe_intermediate_size=64) for _ in range(2))
    place = "model.layers.0.mlp.experts"
    experts, transposed = plain.get_submodule(place), kind == "gpt_oss"
    held = {}
    for leaf in NAMES:
        values = experts.get_parameter(leaf).detach()
        values = values.transpose(1, 2) if transposed else values
        codes = ExpertCodes(rounded(values.flatten(0, 1).contiguous(), "int4"), len(values), transposed)
        held[f"{place}.{leaf}"] = codes
        setattr(experts, leaf, codes.parameter())
    put_experts(model, held)
    coded: nn.Module = model.get_submodule(place)
    assert set(codes_of(coded)) == set(NAMES) and codes_of(experts) == {}
    layer, other = (x.get_submodule("model.layers.0.mlp") for x in (model, plain))
    x = torch.randn(1, 6, 64)
    found, expected = (y[0] if isinstance(y, tuple) else y for y in (layer(x), other(x)))
    assert torch.equal(found, expected)
    for leaf in NAMES:
        assert coded.get_parameter(leaf).untyped_storage().nbytes() == 4
    with pytest.raises(KeyError, match="up_proj"):
        put_experts(model, {f"{place}.up_proj": held[f"{place}.down_proj"]})
