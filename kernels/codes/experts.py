"""Grouped matmuls of a mixture of experts with quantised weights, on Hopper, for few tokens per expert.

As in codes/matmul.py, one warp reads codes and teams of warps multiply. An item is a block of up to 16, 32 or 64 pairs
of token and expert (gpu/mixture/expert_blocks.py), and 64 outputs of the expert for each team: rows are read once for
all teams, since those of a block take as much of the second-level cache's rate as codes. Tokens are gathered by block
first, so that the copy engine can read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from graftlm.kernels.bits12.code_tiles import store_rows
from graftlm.kernels.codes.code_tiles import (
    allocate,
    block_sums,
    read_rows,
    read_tiles,
    sums_layout,
    two_block_sums,
)
from graftlm.kernels.codes.matmul import (
    MAX_STAGES,
    Layout,
    depth_of,
    inputs_of_box,
    num_sms_of,
    row_boxes,
    scale_lines,
    weight_boxes,
)
from graftlm.kernels.codes.tiled_weight import INPUTS, OUTPUTS, TiledWeight
from graftlm.kernels.gpu.mixture.expert_blocks import ExpertBlocks
from graftlm.kernels.gpu.mixture.grouped_matmul import Gate
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options

_PAIRS = ((13, 16), (26, 32))
"""Average tokens per expert up to which a block has so many pairs; with more tokens it has 64."""

LAYOUT = {
    16: Layout(4, 96, 200 * 1024),
    32: Layout(3, 120, 200 * 1024),
    64: Layout(2, 168, 200 * 1024),
}
"""Layouts by the pairs of a block. Gate, up and down of a layer of GPT-OSS 20B take 142 us for 48 rows on an H200, 145
with three teams and stages of two tiles; for 192 rows 159, and 158."""

_TWO_BLOCKS = Layout(3, 120, 222 * 1024)
"""The layout where each team has two blocks of outputs: with it the 142 us are 135."""


@dataclass(frozen=True)
class CodedExperts:
    """The weights of all experts, each as one weight of their concatenated outputs.

    gate_up  gates and ups alternate in eights within each expert; its bias float32 [num_experts * 2 n] likewise
    down     bias float32 [num_experts * k]
    """

    gate_up: TiledWeight
    gate_up_bias: torch.Tensor | None
    down: TiledWeight
    down_bias: torch.Tensor | None
    num_experts: int
    gate: Gate


@gluon.jit
def _expert(column, item, items_of, num_items):
    """Return an item's entry in a column of the table of blocks; 0 for an item beyond the last."""
    return gl.load(column + item // items_of, mask=item < num_items, other=0)


@gluon.jit
def _block(item, items_of, blocks_of, PLACE: gl.constexpr, BLOCKS: gl.constexpr):
    """Return one of an item's blocks of the expert's outputs: the last one again where there are no more."""
    return gl.minimum(item % items_of * BLOCKS + PLACE, blocks_of - 1)


@gluon.jit
def _read(given, SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr):
    """Fill the stages with this program's items in order, as stages become free.

    EARLY  the table was written before the previous kernel let this one start: weights are read before it has ended
    """
    x, codes, scales, shared, table, sizes = given
    _, _, _, ready, free = shared
    block_expert, _, _, _, used = table
    items_of, blocks_of, steps, _, tiles = sizes
    STAGES: gl.constexpr = ready.shape[0]
    DEPTH: gl.constexpr = SHAPE[5]
    BLOCKS: gl.constexpr = SHAPE[6]
    BYTES: gl.constexpr = (SHAPE[0] * 256 + BLOCKS * SHAPE[2] * 1024) * DEPTH + BLOCKS * SHAPE[3] * 128
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    if not EARLY:
        grid_wait(PDL)
    launch_dependents(PDL)
    num_items = gl.load(used) * items_of
    if EARLY:
        for stage in gl.static_range(STAGES):
            item = first + stage // steps * num_programs
            there, expert = item < num_items, _expert(block_expert, item, items_of, num_items)
            mbarrier.expect(ready.index(stage), BYTES, pred=there)
            for place in gl.static_range(BLOCKS):
                tile = (expert * blocks_of + _block(item, items_of, blocks_of, place, BLOCKS)) * tiles
                tile += stage % steps * DEPTH
                read_tiles(codes, scales, shared, stage, stage * BLOCKS + place, tile, there, SHAPE, SCALE_LINES)
        grid_wait(PDL)
    at = 0
    expert = _expert(block_expert, first, items_of, num_items)
    for item in range(first, num_items, num_programs):
        following = _expert(block_expert, item + num_programs, items_of, num_items)
        row = item // items_of * SHAPE[0]
        for step in range(steps):
            s, later = at % STAGES, at >= (STAGES if EARLY else 0)
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES, pred=later)
            for place in gl.static_range(BLOCKS):
                tile = (expert * blocks_of + _block(item, items_of, blocks_of, place, BLOCKS)) * tiles + step * DEPTH
                read_tiles(codes, scales, shared, s, s * BLOCKS + place, tile, later, SHAPE, SCALE_LINES)
            read_rows(x, shared, s, row, step * DEPTH, SHAPE)
            at += 1
        expert = following


@gluon.jit
def _gated(sums, kind: gl.constexpr, alpha, limit, shift, CLAMP: gl.constexpr):
    """Compute gate * sigmoid(alpha * gate) * (up + shift) of sums [64, rows]: eight gates, their eight ups, and so on.

    -> kind [32, rows]
    """
    rows: gl.constexpr = sums.shape[1]
    gates, ups = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, rows]), [0, 2, 3, 1]))
    # rounded as in separate kernels
    gates, ups = gates.to(kind).to(gl.float32), ups.to(kind).to(gl.float32)
    if CLAMP:
        gates = gl.minimum(gates, limit)
        ups = gl.minimum(gl.maximum(ups, -limit), limit)
    active = (gates / (1.0 + gl.exp(-alpha * gates))).to(kind).to(gl.float32)
    return gl.reshape((active * (ups + shift).to(kind).to(gl.float32)).to(kind), [32, rows])


@gluon.jit
def _scatter(found, out, pair, scale, ok, first, n, top_k, out_rank):
    """Store found [outputs, pairs] times the pairs' scales to out[rank, token, n] of each pair that is `ok`."""
    layout: gl.constexpr = found.type.layout
    i = first + gl.arange(0, found.shape[0], layout=gl.SliceLayout(1, layout))
    found = found.to(gl.bfloat16).to(gl.float32) * scale[None, :]
    target = out + (pair % top_k * out_rank + pair // top_k * n)[None, :] + i[:, None]
    gl.store(target, found.to(out.dtype.element_ty), mask=ok[None, :] & (i < n)[:, None])


@gluon.jit
def _multiply(
    given, TEAM: gl.constexpr, SHAPE: gl.constexpr, FORMAT: gl.constexpr, OUTPUT: gl.constexpr, PDL: gl.constexpr
):
    """Compute a team's 64 or 128 outputs of each of the program's items."""
    shared, factors, table, out, sizes, gate = given
    ROWS: gl.constexpr = SHAPE[0]
    EACH: gl.constexpr = SHAPE[6] // SHAPE[4]
    layout: gl.constexpr = sums_layout(ROWS)
    block_expert, block_start, block_end, pairs, used = table
    items_of, blocks_of, steps, n, _ = sizes
    weight_scales, bias, routing, top_k, out_rank = factors
    alpha, limit, shift = gate
    grid_wait(PDL)
    num_items = gl.load(used) * items_of
    at, num_programs = 0, gl.num_programs(0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    for item in range(gl.program_id(0), num_items, num_programs):
        group = item // items_of
        expert = gl.load(block_expert + group)
        start = gl.load(block_start + group)
        count = gl.load(block_end + group) - start
        if EACH == 2:
            found = two_block_sums(shared, at, steps, TEAM, SHAPE, FORMAT)
        else:
            found = (block_sums(shared, at, steps, TEAM, SHAPE, FORMAT),)
        at += steps
        for own in gl.static_range(EACH):
            sums, tile = found[own], _block(item, items_of, blocks_of, TEAM * EACH + own, SHAPE[6])
            i = (expert * blocks_of + tile) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            if FORMAT[0] == 0:
                sums *= gl.load(weight_scales + i)[:, None]
            if OUTPUT[0]:
                sums += gl.load(bias + i)[:, None]
            if OUTPUT[1]:
                gated = _gated(sums, out.dtype.element_ty, alpha, limit, shift, OUTPUT[2])
                store_rows(gated, out, group * ROWS, count, tile * 32, n)
            else:
                pair = gl.load(pairs + start + row, mask=row < count, other=0)
                factor = gl.load(routing + pair, mask=row < count, other=0.0).to(gl.float32)
                _scatter(sums, out, pair, factor, row < count, tile * 64, n, top_k, out_rank)


@gluon.jit(do_not_specialize=["items_of", "blocks_of", "steps", "tiles", "top_k"])
def _coded_experts(
    x_tiles, codes, scale_tiles, weight_scales, bias, routing, out,
    block_expert, block_start, block_end, pairs, used, items_of, blocks_of, steps, tiles, n, top_k, out_rank,
    alpha, limit, shift,
    SHAPE: gl.constexpr, SCALE_LINES: gl.constexpr, STAGES: gl.constexpr, FORMAT: gl.constexpr, OUTPUT: gl.constexpr,
    EARLY: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items).

    OUTPUT  whether there are a bias and gates, and whether these have a limit
    EARLY   of `_read`: down follows gate_up, which lets it start once the table is there
    """
    shared, _, _ = allocate(x_tiles, codes, scale_tiles, SHAPE, STAGES)
    table, sizes = (block_expert, block_start, block_end, pairs, used), (items_of, blocks_of, steps, n, tiles)
    factors, gate = (weight_scales, bias, routing, top_k, out_rank), (alpha, limit, shift)
    given = (shared, factors, table, out, sizes, gate)
    reading = (x_tiles, codes, scale_tiles, shared, table, sizes)
    if SHAPE[4] == 4:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 2, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 3, SHAPE, FORMAT, OUTPUT, PDL)),
                (_read, (reading, SHAPE, SCALE_LINES, EARLY, PDL)),
            ],
            [4, 4, 4, 1],  # warps
            [REGISTERS, REGISTERS, REGISTERS, 24],  # registers of a thread
        )
    elif SHAPE[4] == 3:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 2, SHAPE, FORMAT, OUTPUT, PDL)),
                (_read, (reading, SHAPE, SCALE_LINES, EARLY, PDL)),
            ],
            [4, 4, 1],  # warps
            [REGISTERS, REGISTERS, 24],  # registers of a thread
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (given, 0, SHAPE, FORMAT, OUTPUT, PDL)),
                (_multiply, (given, 1, SHAPE, FORMAT, OUTPUT, PDL)),
                (_read, (reading, SHAPE, SCALE_LINES, EARLY, PDL)),
            ],
            [4, 1],  # warps
            [REGISTERS, 24],  # registers of a thread
        )


def _suits_two(blocks_of: int, num_experts: int, routing: torch.Tensor, num_sms: int) -> bool:
    """Return True if the longest program multiplies no more blocks where each team has two, with even routing.

    routing  [num_tokens, top_k]
    """
    num_tokens, top_k = routing.shape
    used = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)

    def most(places: int) -> int:
        return math.ceil(used * -(-blocks_of // places) / num_sms) * places

    return most(2 * _TWO_BLOCKS.teams) <= most(LAYOUT[16].teams)


def _launch(
    x: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    experts: CodedExperts,
    blocks: ExpertBlocks,
    routing: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch with x [max_blocks * pairs, k], gathered; out [max_blocks * pairs, n] or [top_k, num_tokens, n]."""
    k, gated, gate = x.shape[1], out.dim() == 2, experts.gate
    box, rows, num_sms = inputs_of_box(weight), blocks.block, num_sms_of(x.device)
    blocks_of = weight.num_outputs // experts.num_experts // OUTPUTS
    two = rows <= 16 and weight.kind == "power" and _suits_two(blocks_of, experts.num_experts, routing, num_sms)
    layout = _TWO_BLOCKS if two else LAYOUT[rows]
    places = layout.teams * (2 if two else 1)
    items_of = triton.cdiv(blocks_of, places)
    num_items = len(blocks.block_expert) * items_of
    depth, tiles = depth_of(weight, layout), triton.cdiv(k, INPUTS)
    codes, scales = weight_boxes(weight, depth)
    lines = scale_lines(weight, depth)
    stage = (rows * 256 + places * weight.bits * 1024) * depth + places * lines * 128
    _coded_experts[(min(num_items, num_sms),)](
        row_boxes(x, depth * INPUTS // box, rows, box), codes, scales, weight.scales,
        bias if bias is not None else weight.scales, routing, out,
        blocks.block_expert, blocks.block_start, blocks.block_end, blocks.pairs, blocks.used, items_of, blocks_of,
        triton.cdiv(tiles, depth), tiles, out.shape[-1], routing.shape[-1], 0 if gated else out.stride(0),
        gate.alpha, gate.limit or 0.0, gate.shift,
        SHAPE=(rows, box, weight.bits, lines, layout.teams, depth, places), SCALE_LINES=weight.scale_lines,
        STAGES=max(min(layout.shared // stage, MAX_STAGES), 2), FORMAT=(weight.groups, weight.kind, weight.table or ""),
        OUTPUT=(bias is not None, gated, gate.limit is not None),
        EARLY=not gated, REGISTERS=layout.registers, num_warps=4, maxnreg=layout.registers, **pdl_options(routing),
    )  # fmt: skip


def coded_parts(x: torch.Tensor, weights: CodedExperts, experts: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Run each token of x [num_tokens, k] through its experts.

    experts  int32 [num_tokens, top_k], scales [num_tokens, top_k], both contiguous
    -> float32 [top_k, num_tokens, k], the sum over whose first dimension is the output
    """
    (num_tokens, top_k), num_experts = experts.shape, weights.num_experts
    density = experts.numel() / num_experts
    block = next((pairs for most, pairs in _PAIRS if density <= most), 64)
    blocks = ExpertBlocks.of(experts, num_experts, block, lay_out=x)
    assert blocks.laid is not None
    hidden = torch.empty(
        len(blocks.laid), weights.gate_up.num_outputs // num_experts // 2, dtype=x.dtype, device=x.device
    )
    _launch(blocks.laid, weights.gate_up, weights.gate_up_bias, weights, blocks, scales, hidden)
    out = torch.empty(top_k, num_tokens, weights.down.num_outputs // num_experts, dtype=torch.float32, device=x.device)
    _launch(hidden, weights.down, weights.down_bias, weights, blocks, scales, out)
    return out
