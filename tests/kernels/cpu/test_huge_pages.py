from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from graftlm.kernels.cpu.huge_pages import HUGE, blocks_of, huge_buffer, move, pieces_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pages of Linux")


def test_blocks_are_whole_huge_pages_around_the_memory_and_joined() -> None:
    x = torch.zeros(16 * HUGE, dtype=torch.uint8)
    start = -(-x.data_ptr() // HUGE) * HUGE
    assert blocks_of([(start + 5, start + 6), (start + HUGE + 1, start + 3 * HUGE)]) == [(start, start + 3 * HUGE)]
    assert pieces_of([(0, 9 * HUGE)]) == [(0, 4 * HUGE), (4 * HUGE, 8 * HUGE), (8 * HUGE, 9 * HUGE)]


def test_memory_of_files_and_of_nobody_is_no_block() -> None:
    assert blocks_of([(0, HUGE), (HUGE * 3, HUGE * 3 + 1)]) == []


def test_memory_in_huge_pages_has_the_same_content() -> None:
    x = torch.arange(4 * HUGE, dtype=torch.int32)
    start = -(-x.data_ptr() // HUGE) * HUGE
    if not move(start, start + 4 * HUGE):
        pytest.skip("this kernel moves no memory into huge pages")
    assert torch.equal(x, torch.arange(4 * HUGE, dtype=torch.int32))
    assert _huge_bytes(start) >= 4 * HUGE


def test_a_buffer_is_in_huge_pages_from_the_start() -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not modes.exists() or "[never]" in modes.read_text():
        pytest.skip("this kernel has no huge pages")
    buffer = huge_buffer(4 * HUGE).fill_(7)
    assert buffer.data_ptr() % HUGE == 0
    assert _huge_bytes(buffer.data_ptr()) > 0


def test_what_is_not_mapped_any_more_is_left_alone() -> None:
    assert not move(HUGE * 3, HUGE * 4)


def _huge_bytes(address: int) -> int:
    """The bytes in huge pages of the mapping that has this address."""
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        low, high = (int(x, 16) for x in entry.split(None, 1)[0].split("-"))
        if low <= address < high:
            return int(re.findall(r"AnonHugePages:\s+(\d+)", entry)[0]) * 1024
    return 0
