"""Models rounded while they are loaded, and folders of rounded weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import graftlm as gl
from graftlm.cli import app
from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.model.load import load_model
from graftlm.core.model.quantised.rounding import Scheme, rounded
from tests.models import byte_tokenizer, tiny_model

LOSS = {"fp8": 0.03, "int8": 0.008, "int4": 0.09}
"""The largest relative error of normally distributed weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    tiny_model(hidden_size=128, intermediate_size=256, num_hidden_layers=1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize("scheme", LOSS)
def test_rounded_weights_are_close(scheme: Scheme) -> None:
    weight = torch.randn(48, 256)
    weight[3] = 0
    found = rounded(weight, scheme).dense()
    assert bool((found[3] == 0).all())
    assert float((found - weight).norm() / weight.norm()) < LOSS[scheme]


def test_the_search_loses_less_than_rounding_and_weighs_inputs() -> None:
    weight, importance = torch.randn(32, 128), torch.rand(128).pow(4)
    scale = weight.view(32, 4, 32).abs().amax(2, keepdim=True) / 7
    plain = ((weight.view(32, 4, 32) / scale).round() * scale).view(32, 128) - weight
    found = rounded(weight, "int4").dense() - weight
    weighed = rounded(weight, "int4", importance=importance).dense() - weight
    assert float(found.norm()) < 0.9 * float(plain.norm())
    assert float((weighed.square() * importance).sum()) < float((found.square() * importance).sum())


def test_weights_that_have_no_codes_are_told() -> None:
    with pytest.raises(ValueError, match="40 inputs are no multiple of 32"):
        rounded(torch.ones(4, 40), "int4")
    with pytest.raises(ValueError, match="not finite"):
        rounded(torch.full((4, 64), math.inf), "int4")


@pytest.mark.parametrize("scheme", ["int4"])
def test_a_model_is_rounded_while_it_is_loaded(folder: Path, scheme: str) -> None:
    loaded = load_model(folder, EngineConfig(device="cpu", dtype="bfloat16", quantization=scheme))
    assert loaded.lane == "paged"
    assert loaded.fusions.num_packed == 8  # the head too, plain
    assert not any(parameter.dim() == 2 for name, parameter in loaded.model.named_parameters() if "proj" in name)


def test_what_no_kernel_multiplies_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="use dtype='bfloat16'"):
        load_model(folder, EngineConfig(device="cpu", dtype="float32", quantization="int4"))
    with pytest.raises(ConfigError, match="int3.*use one of fp8, int8, int4"):
        load_model(folder, EngineConfig(device="cpu", quantization="int3"))


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_a_written_folder_holds_the_rounded_weights(folder: Path, tmp_path: Path, scheme: str) -> None:
    out = tmp_path / "rounded"
    command = ["quantize", str(folder), str(out), "--to", scheme, "--check", "--json", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert 0 < found["kl"] < 0.2 and 0.5 < found["same_top"] <= 1
    assert found["bytes"] < sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with gl.Runtime(str(out), device="cpu", dtype="float32") as runtime:
        assert runtime.generate("a b c", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    again = CliRunner().invoke(app, ["quantize", str(folder), str(out)])
    assert again.exit_code != 0
