from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from graftlm.kernels.cpu.linear import packed_pieces
from graftlm.kernels.cpu.linear.packed_linear import PackedLinear
from graftlm.kernels.cpu.linear.packed_pieces import PackedPieces, outputs_of_piece
from graftlm.kernels.cpu.linear.skinny_linear import SkinnyLinear

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_pieces, "_PIECE_BYTES", 64 * 48 * 4)


def packed_in_pieces(linear: nn.Linear) -> PackedPieces:
    found = PackedPieces.of(linear, PackedLinear)
    assert found is not None
    found.release_original()
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_a_layer_in_pieces_answers_as_the_plain_one(num_rows: int, bias: bool) -> None:
    linear, x = nn.Linear(48, 200, bias=bias), torch.randn(num_rows, 48)
    with torch.no_grad():
        expected = linear(x)
        packed = packed_in_pieces(linear)
        torch.testing.assert_close(packed(x), expected)
        panels = packed.panels()
        if panels is None:
            pytest.skip("oneDNN lays weights out otherwise on this CPU")
        assert [part.num_out for part in panels] == [64, 64, 64, 8]
        torch.testing.assert_close(SkinnyLinear(panels, None, torch.float32)(x), expected)


def test_a_weight_in_pieces_comes_back_and_is_saved_as_it_was() -> None:
    linear = nn.Linear(48, 200)
    weight = linear.weight.detach().clone()
    packed = packed_in_pieces(linear)
    assert linear.weight.numel() == 0 and packed.dtype is torch.float32
    assert torch.equal(packed.state_dict()["weight"], weight)
    assert packed.unpack() is linear and torch.equal(linear.weight, weight)


def test_a_piece_that_cannot_be_packed_leaves_the_layer_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_pieces, "_PIECE_BYTES", 64 * 1024 * 4)  # whole pages, which are discarded
    linear, seen = nn.Linear(1024, 200), []
    weight = linear.weight.detach().clone()

    def pack(rows: nn.Linear) -> PackedLinear | None:
        seen.append(rows)
        return PackedLinear(rows) if len(seen) < 3 else None

    with torch.no_grad():
        assert PackedPieces.of(linear, pack) is None
    assert len(seen) == 3 and torch.equal(linear.weight, weight)


def test_there_are_at_most_sixteen_pieces_of_whole_panels() -> None:
    assert outputs_of_piece(torch.empty(128, 48)) == 64
    assert outputs_of_piece(torch.empty(16 * 128, 48)) == 128


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is given back on Linux only")
def test_a_large_head_was_in_memory_twice_while_it_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_pieces, "_PIECE_BYTES", 4 * MIB)
    linear = nn.Linear(1024, 64 * MIB // 4096, bias=False)
    status = Path("/proc/self/status")

    def resident_mib() -> float:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) / 1024

    before, seen = resident_mib(), []

    def pack(rows: nn.Linear) -> PackedLinear:
        packed = PackedLinear(rows)
        seen.append(resident_mib() - before)
        return packed

    assert PackedPieces.of(linear, pack) is not None
    assert len(seen) == 16 and max(seen) < 32  # 64 otherwise
