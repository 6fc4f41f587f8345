"""Checkpoints whose quantised weights would be read without their scales are refused before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ModelError
from graftlm.core.model.load import load_model
from graftlm.core.model.quantised.format_check import check_unexpected
from tests.models import byte_tokenizer, tiny_model

NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def add(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None) -> None:
    """Write tensors into the weight file of a folder, and a quantization_config into its config.json."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    if quantization is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def load(folder: Path) -> Any:
    return load_model(folder, EngineConfig(device="cpu"))


FP8 = {f"{NAME}.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    "tensor",
    [
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_packed",
        "qweight",
        "qzeros",
        "SCB",
        "weight.absmax",
    ],
)
def test_scales_that_the_configuration_does_not_name_are_refused(folder: Path, tensor: str) -> None:
    add(folder, {f"{NAME}.{tensor}": torch.ones(1)})
    with pytest.raises(ModelError) as error:
        load(folder)
    said = str(error.value)
    assert f"{NAME}.{tensor}" in said and "no quantization_config" in said and "docs/quantised.md" in said


def test_a_method_that_nothing_reads_is_refused_by_name(folder: Path) -> None:
    add(folder, FP8 | {f"{NAME}.weight_scale": torch.ones(1)}, {"quant_method": "somebits", "bits": 3})
    with pytest.raises(ModelError, match=r"quantised as 'somebits', which cannot be read; use another file"):
        load(folder)


def test_a_method_whose_package_is_missing_is_refused_by_name(folder: Path) -> None:
    sizes = {"in_group_size": 8, "out_group_size": 1, "num_codebooks": 1, "nbits_per_codebook": 16}
    add(folder, {}, {"quant_method": "aqlm", **sizes})
    with pytest.raises(ModelError, match=r"as 'aqlm', which transformers could not read here.*AQLM.*use another file"):
        load(folder)


def test_tensors_of_another_method_are_refused(folder: Path) -> None:
    add(folder, {f"{NAME}.qweight": torch.ones(1)}, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ModelError, match=r"qweight.* as auto-round or awq or gptq or sinq writes them, .* as 'fp8'"):
        load(folder)


def test_scales_of_keys_and_values_are_no_weights(folder: Path) -> None:
    add(folder, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    assert load(folder).lane == "paged"


def test_unexpected_parts_of_weights_are_refused_after_the_load() -> None:
    check_unexpected("a/model", ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.v_scale"], None)
    with pytest.raises(ModelError, match=r"1 tensors of 'a/model', 'x.codebooks' first, look like parts"):
        check_unexpected("a/model", ["x.codebooks"], None)
