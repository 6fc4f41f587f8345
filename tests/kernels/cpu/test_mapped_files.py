from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graftlm.kernels.cpu.mapped_files import MappedFiles, discard, read_once

MIB = 1 << 20


def resident_file_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are counted and released on Linux only")
def test_a_weight_that_was_read_from_a_file_leaves_memory_and_is_read_again(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(8 * MIB // 4, dtype=torch.float32)}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        weight = file.get_tensor("weight")
    total = weight.sum()
    before = resident_file_bytes()
    released = MappedFiles().release(weight)
    if released:  # not where safetensors reads rather than maps
        assert released > 7 * MIB and before - resident_file_bytes() > 7 * MIB
    assert weight.sum() == total


def test_memory_that_is_in_no_file_is_left_alone() -> None:
    weight = torch.ones(MIB)
    assert MappedFiles().release(weight) == 0 and weight.sum() == MIB


def test_rows_that_do_not_lie_together_are_left_alone() -> None:
    assert MappedFiles().release(torch.ones(1024, 1024)[:, ::2]) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are counted and released on Linux only")
def test_what_is_read_once_from_a_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8 * MIB)}, path)
    with read_once([path]), safe_open(path, framework="pt") as file:
        weight = file.get_tensor("weight")
        if weight not in MappedFiles():
            pytest.skip("safetensors reads rather than maps")
        before, deadline = resident_file_bytes(), time.monotonic() + 120
        assert weight.to(torch.bfloat16).sum() == 8 * MIB
        while resident_file_bytes() > before + MIB and time.monotonic() < deadline:
            pass
        assert resident_file_bytes() <= before + MIB
        assert weight.sum() == 8 * MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are released on Linux only")
def test_a_file_that_someone_else_has_mapped_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(MIB)}, path)
    with safe_open(path, framework="pt") as file:
        weight = file.get_tensor("weight")
    weight[0] = 7.0  # a private copy of the page, which would be lost
    with read_once([path]):
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert weight[0] == 7.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is given back on Linux only")
def test_discarded_memory_is_empty_and_what_lies_beside_it_stays() -> None:
    x = torch.ones(4 * MIB)
    discard(x[MIB : 2 * MIB])
    assert x[:MIB].sum() == MIB and x[2 * MIB :].sum() == 2 * MIB
    assert x[MIB : 2 * MIB].sum() < MIB // 100
