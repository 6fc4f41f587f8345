"""The matmul by AMX tiles, with its instructions on tile registers replaced by loops over memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from llvmlite import ir
from numba.core import cgutils

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import PanelCall
from graftlm.kernels.cpu.compiled.loop_runtime import link
from graftlm.kernels.cpu.linear.quantised_panels import pack
from graftlm.kernels.cpu.loops import quantised_panels
from graftlm.kernels.cpu.loops.quantised_amx import Tiles, amx_panel
from graftlm.kernels.cpu.loops.quantised_panels import compile_quantised_panel
from graftlm.kernels.cpu.loops.register_tiles import address, constant, has_bfloat16_dots
from graftlm.kernels.cpu.panel_kind import Arithmetic
from tests.kernels.cpu.linear.test_quantised_panels import NUM_IN, NUM_OUT, weight_in

_BYTE, _WORD, _SINGLE = ir.IntType(8), ir.IntType(64), ir.FloatType()
_LINE = 64


class EmulatedTiles(Tiles):
    """Tile registers in memory, by the pseudo-code of their instructions."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        held = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 8 * 1024))
        self._registers, self._shapes = builder.ptrtoint(held, _WORD), constant(0)

    def _run(self, text: str, *arguments: Any) -> None:
        if text.startswith("ldtilecfg"):
            self._shapes = arguments[0]

    def _shape(self, tile: int) -> tuple[Any, Any]:
        """Return the rows of a tile, and their bytes."""
        rows, width = (address(self.builder, self._shapes, constant(x), _BYTE) for x in (48 + tile, 16 + 2 * tile))
        found = (self.builder.zext(self.builder.load(x), _WORD) for x in (rows, width))
        return next(found), next(found)

    def _at(self, tile: int, row: Any, byte: Any, kind: Any) -> Any:
        offset = self.builder.add(constant(1024 * tile), self.builder.mul(row, constant(_LINE)))
        return address(self.builder, self._registers, self.builder.add(offset, byte), kind)

    def _copy(self, tile: int, place: Any, stride: Any, *, loads: bool) -> None:
        builder, (rows, width) = self.builder, self._shape(tile)
        with cgutils.for_range(builder, rows) as row, cgutils.for_range(builder, width) as byte:
            there = address(builder, builder.add(place, builder.mul(row.index, stride)), byte.index, _BYTE)
            here = self._at(tile, row.index, byte.index, _BYTE)
            builder.store(builder.load(there if loads else here), here if loads else there)

    def load(self, tile: int, place: Any, stride: Any) -> None:
        self._copy(tile, place, stride, loads=True)

    def store(self, tile: int, place: Any, stride: Any) -> None:
        self._copy(tile, place, stride, loads=False)

    def zero(self, tile: int) -> None:
        builder = self.builder
        with cgutils.for_range(builder, constant(1024)) as byte:
            builder.store(ir.Constant(_BYTE, 0), self._at(tile, constant(0), byte.index, _BYTE))

    def dot(self, sums: int, inputs: int, codes: int) -> None:
        builder, (rows, _), (pairs, width) = self.builder, self._shape(sums), self._shape(codes)
        with (
            cgutils.for_range(builder, rows) as m,
            cgutils.for_range(builder, pairs) as k,
            cgutils.for_range(builder, builder.lshr(width, constant(2))) as n,
        ):
            four_k, four_n = (builder.shl(x.index, constant(2)) for x in (k, n))
            total = self._at(sums, m.index, four_n, _SINGLE)
            for half in (0, 2):
                a = self._float(self._at(inputs, m.index, builder.add(four_k, constant(half)), ir.IntType(16)))
                b = self._float(self._at(codes, k.index, builder.add(four_n, constant(half)), ir.IntType(16)))
                builder.store(builder.fadd(builder.load(total), builder.fmul(a, b)), total)

    def _float(self, place: Any) -> Any:
        bits = self.builder.zext(self.builder.load(place), ir.IntType(32))
        return self.builder.bitcast(self.builder.shl(bits, ir.Constant(bits.type, 16)), _SINGLE)


@pytest.mark.skipif(not has_bfloat16_dots(), reason="codes are decoded by instructions of AVX-512")
@pytest.mark.parametrize("name", ["Q4_1", "Q5_K"])
def test_a_matmul_by_tiles_is_as_exact_as_one_with_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with rows too few for tiles, and with tiles of fewer rows, which overlap."""
    monkeypatch.setattr(quantised_panels, "has", lambda feature: True)
    monkeypatch.setattr(quantised_panels, "amx_panel", partial(amx_panel, tiles_of=EmulatedTiles))
    weight = weight_in(name, torch.bfloat16)
    panels = pack(weight, None, Arithmetic.DOTS)
    compiled = compile_quantised_panel(Arithmetic.DOTS, *panels.kind.arguments)
    run: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(link(compiled))
    exact = replace(weight, dtype=torch.float32).dense().double()
    for num_rows in (1, 2, 3, 16, 17, 37, 64):
        x = torch.randn(num_rows, NUM_IN).bfloat16()
        sums = x.float().view(num_rows, -1, 32).sum(-1)
        out = torch.full((len(panels.packed), num_rows, PANEL), torch.nan)
        for panel, place in zip(panels.packed, out, strict=True):
            call: Any = PanelCall(num_rows=num_rows, num_blocks=NUM_IN // panels.kind.block, sums_row=sums.shape[1])
            call.out, call.x, call.x_row, call.sums = place.data_ptr(), x.data_ptr(), 2 * NUM_IN, sums.data_ptr()
            call.panel, call.table = panel.data_ptr(), panels.table.data_ptr()
            run(ctypes.addressof(call))
        expected = x.double() @ exact.T
        found = out.transpose(0, 1).reshape(num_rows, -1)[:, :NUM_OUT].double()
        assert (found - expected).abs().max() <= 4e-7 * expected.abs().max()
