"""The shards of a folder: side by side they are the whole model, of plain and of quantised files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.model.weights import read_weights
from graftlm.core.tensor_parallel.ranks import Ranks
from graftlm.core.tensor_parallel.shard_plan import ShardPlan
from graftlm.core.tensor_parallel.shards import read_shard
from tests.core.model.quantised.test_formats import write
from tests.models import tiny_model

CPU = torch.device("cpu")
CONFIG = EngineConfig(device="cpu", dtype="float32")


class Quiet:
    """The progress of ranks that nobody watches."""

    def summing(self, number: int) -> None: ...

    def summed(self) -> None: ...


def shards_of(folder: Path) -> list[nn.Module]:
    return [read_shard(str(folder), CONFIG, Ranks(rank, 2, CPU, "", Quiet())) for rank in range(2)]


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2", "phi3", "gemma4", "AWQ"])
def test_shards_side_by_side_are_the_model(kind: str, tmp_path: Path) -> None:
    if kind == "AWQ":
        write(tmp_path, kind)
    else:
        tiny_model(kind).save_pretrained(tmp_path)
    whole: Any = read_weights(str(tmp_path), CONFIG, CPU)
    parts = [dict(shard.named_parameters()) for shard in shards_of(tmp_path)]
    plan = ShardPlan.of(kind, whole.config, 2)
    for name, parameter in whole.named_parameters():
        piece, (one, other) = plan.pieces.get(name), (part[name] for part in parts)
        if name == "lm_head.weight" and len(one) < len(parameter):
            assert torch.equal(torch.cat([one, other]), parameter)
        elif piece is None:
            assert torch.equal(one, parameter) and torch.equal(other, parameter), name
        else:
            packed = [part.split(piece.sizes(part.shape[piece.axis]), piece.axis) for part in (one, other)]
            both = [half for halves in zip(*packed, strict=True) for half in halves]
            assert torch.equal(torch.cat(both, piece.axis), parameter), name


def test_while_a_model_loads_a_sum_is_that_of_equal_parts(tmp_path: Path) -> None:
    """A module that leaves the sum out differs by it, which is how fused ones are refused."""
    tiny_model("llama").save_pretrained(tmp_path)
    shard: Any = shards_of(tmp_path)[0]
    projection = shard.model.layers[0].self_attn.o_proj
    x = torch.randn(3, projection.in_features)
    assert torch.allclose(projection(x), 2 * x @ projection.weight.T, atol=1e-6)
