"""Which weight files are only read once, and which weights leave their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graftlm.core.errors import ConfigError
from graftlm.core.fusion.linears import Fusions
from graftlm.core.model.weights import choose_device, converted_files, leave_files
from graftlm.kernels.cpu.mapped_files import MappedFiles

FLOAT, HALF = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)


def test_a_file_is_read_once_if_every_tensor_of_it_is_converted(tmp_path: Path) -> None:
    save_file({"a": FLOAT, "b": FLOAT.clone()}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"a": FLOAT, "b": HALF}, tmp_path / "2.safetensors")
    assert converted_files(str(tmp_path), torch.bfloat16) == [tmp_path / "1.safetensors"]
    assert converted_files(str(tmp_path), torch.float32) == []
    assert converted_files(str(tmp_path), "auto") == []
    assert converted_files("someone/model", torch.bfloat16) == []


def test_a_damaged_file_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").write_bytes(b"no header")
    (tmp_path / "2.safetensors").write_bytes((9000).to_bytes(8, "little") + b"[" * 9000)
    assert converted_files(str(tmp_path), torch.bfloat16) == []


def test_only_weights_that_lie_in_files_are_copied(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(64, 64)}, tmp_path / "1.safetensors")
    mapped, own = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    mapped.weight.data = load_file(tmp_path / "1.safetensors")["weight"]
    if mapped.weight.data not in MappedFiles():
        pytest.skip("safetensors reads rather than maps")
    before = own.weight.data_ptr()
    leave_files(nn.Sequential(mapped, own), Fusions(num_packed=1))
    assert mapped.weight.data not in MappedFiles() and bool((mapped.weight == 1).all())
    assert own.weight.data_ptr() == before


def test_a_device_that_no_kernel_supports_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="device is 'mps'; GraftLM runs on CPUs and on NVIDIA GPUs"):
        choose_device("mps")
