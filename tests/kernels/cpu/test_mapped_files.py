from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graftlm.kernels.cpu.mapped_files import MappedFiles

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
