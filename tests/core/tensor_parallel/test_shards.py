"""The shards of a folder: side by side they are the whole model, of plain and of quantised files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.model.description import resolve
from graftlm.core.model.weights import read_weights
from graftlm.core.tensor_parallel.ranks import Ranks
from graftlm.core.tensor_parallel.shard_plan import ShardPlan
from graftlm.core.tensor_parallel.shards import read_shard
from graftlm.kernels.quantised_modules import QuantisedLinear
from tests.core.model.quantised.test_formats import write, write_mxfp4
from tests.gguf_files import coded
from tests.models import tiny_model

CPU = torch.device("cpu")
CONFIG = EngineConfig(device="cpu", dtype="float32")


class Quiet:
    """The progress of ranks that nobody watches."""

    def summing(self, number: int) -> None: ...

    def summed(self) -> None: ...


def shards_of(source: Path, config: EngineConfig = CONFIG) -> list[nn.Module]:
    return [read_shard(str(source), config, Ranks(rank, 2, CPU, "", Quiet())) for rank in range(2)]


def made(kind: str, folder: Path) -> Path:
    if kind == "AWQ":
        write(folder, kind)
    elif kind == "MXFP4":
        write_mxfp4(folder, intermediate_size=64)
    elif kind == "GGUF":
        return Path(resolve(str(coded(folder / "model.gguf", intermediate_size=128))))
    else:
        tiny_model(kind).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2", "phi3", "gemma4", "AWQ", "MXFP4", "GGUF"])
def test_shards_side_by_side_are_the_model(kind: str, tmp_path: Path) -> None:
    source = made(kind, tmp_path)
    whole: Any = read_weights(str(source), CONFIG, CPU)
    parts = [dict(shard.named_parameters()) for shard in shards_of(source)]
    plan = ShardPlan.of(kind, whole.config, 2)
    for name, parameter in whole.named_parameters():
        piece, (one, other) = plan.pieces.get(name), (part[name] for part in parts)
        if name == "lm_head.weight" and len(one) < len(parameter):
            assert torch.equal(torch.cat([one, other]), parameter)
        elif piece is None:
            assert torch.equal(one, parameter) and torch.equal(other, parameter), name
        elif piece.cut == "first":
            assert torch.equal(one, parameter) and not other.any(), name
        else:
            packed = [part.split(piece.sizes(part.shape[piece.axis]), piece.axis) for part in (one, other)]
            both = [half for halves in zip(*packed, strict=True) for half in halves]
            assert torch.equal(torch.cat(both, piece.axis), parameter), name


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_shards_of_a_model_that_is_rounded_are_those_of_its_codes(scheme: str, tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", dtype="bfloat16", quantization=scheme)
    whole, shards = read_weights(str(tmp_path), config, CPU), shards_of(tmp_path, config)
    for name, axis in (("q_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        path = next(path for path, _ in whole.named_modules() if path.endswith(name))
        expected: Any = whole.get_submodule(path)
        parts: list[Any] = [shard.get_submodule(path) for shard in shards]
        assert type(expected) is QuantisedLinear and all(type(part) is QuantisedLinear for part in parts)
        assert torch.equal(torch.cat([part.weight for part in parts], axis), expected.weight), name


def test_a_quantised_weight_that_has_no_part_is_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path, "GPTQ, act-order")
    with pytest.raises(ConfigError, match=r"tensor_parallel is 2, but .*down_proj.* cannot be cut: .*act-order.*=1"):
        shards_of(tmp_path)
    (tmp_path / "moe").mkdir()
    write_mxfp4(tmp_path / "moe")
    with pytest.raises(ConfigError, match=r"down_proj' cannot be cut: 1 groups of inputs are no multiple of 2 ranks"):
        shards_of(tmp_path / "moe")


def test_while_a_model_loads_a_sum_is_that_of_equal_parts(tmp_path: Path) -> None:
    """A module that leaves the sum out differs by it, which is how fused ones are refused."""
    tiny_model("llama").save_pretrained(tmp_path)
    shard: Any = shards_of(tmp_path)[0]
    projection = shard.model.layers[0].self_attn.o_proj
    x = torch.randn(3, projection.in_features)
    assert torch.allclose(projection(x), 2 * x @ projection.weight.T, atol=1e-6)
