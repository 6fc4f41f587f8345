"""Grouped matmuls of a mixture of experts with 12-bit weights, on Hopper, for few tokens per expert.

As in bits12/matmul.py, one warp reads codes, two groups multiply in turn, one adds the listed weights.
An item is a block of up to 16 or 32 pairs of token and expert (gpu/mixture/expert_blocks.py), and 64 outputs of the
expert. Tokens are gathered by block first, so that the copy engine can read them.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from graftlm.kernels.bits12.code_tiles import (
    allocate,
    block_sums,
    codes_layout,
    hand_over,
    listed_range,
    one_of_each,
    read_codes,
    store_rows,
    take_over,
)
from graftlm.kernels.bits12.weight_codec import INPUTS, LINES, OUTPUTS, SENTINEL, CompactWeight, compacted
from graftlm.kernels.gpu.mixture.expert_blocks import ExpertBlocks
from graftlm.kernels.gpu.pdl import grid_wait, launch_dependents, pdl_options
from graftlm.kernels.hopper.tiles import K, gated, load, tiled

DENSITY = 13
"""Average tokens per expert up to which a block has 16 pairs; with more tokens it has 32."""

_STAGES = {16: 10, 32: 8}
"""Stages of the pipeline by pairs of a block: as many as fit in shared memory, even, so that a stage has one group."""

_REGISTERS = 96
_SENTINEL = gl.constexpr(SENTINEL)
_LINES = gl.constexpr(LINES)
_INPUTS = gl.constexpr(INPUTS)


@gluon.jit
def _expert(column, item, blocks_of, num_items):
    """Return an item's entry in a column of the table of blocks; 0 for an item beyond the last."""
    return gl.load(column + item // blocks_of, mask=item < num_items, other=0)


@gluon.jit
def _read(x, codes, shared, table, sizes, PDL: gl.constexpr):
    xs, _, ready, free = shared
    block_expert, _, _, _, used = table
    blocks_of, steps, _, _ = sizes
    STAGES: gl.constexpr = ready.shape[0]
    K: gl.constexpr = xs.shape[2]
    BYTES: gl.constexpr = xs.shape[1] * 2 * K * 2 + _LINES * 128
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    launch_dependents(PDL)
    grid_wait(PDL)
    num_items = gl.load(used) * blocks_of
    at = 0
    expert = _expert(block_expert, first, blocks_of, num_items)
    for item in range(first, num_items, num_programs):
        following = _expert(block_expert, item + num_programs, blocks_of, num_items)
        tile = (expert * blocks_of + item % blocks_of) * steps
        row = item // blocks_of * xs.shape[1]
        for step in range(steps):
            s = at % STAGES
            mbarrier.wait(free.index(s), (at // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), BYTES)
            read_codes(codes, shared, s, tile + step, True)
            for box in gl.static_range(2):
                load(x, [row, (step * 2 + box) * K], ready.index(s), xs.index(s * 2 + box))
            at += 1
        expert = following


@gluon.jit
def _four_of_each(inputs, values, at, end):
    """Return the next four listed weights of each output, whose inputs are then read concurrently."""
    a, u = one_of_each(inputs, values, at, end)
    b, v = one_of_each(inputs, values, at + 1, end)
    c, w = one_of_each(inputs, values, at + 2, end)
    d, z = one_of_each(inputs, values, at + 3, end)
    return a, b, c, d, u, v, w, z


@gluon.jit
def _input_of(x, rows, column, there):
    return gl.load(x + rows + column[:, None], mask=(column >= 0)[:, None] & there, other=0.0).to(gl.float32)


@gluon.jit
def _add_listed(x, given, handed, lists, table, sizes, PDL: gl.constexpr):
    starts, most, inputs, values = lists
    block_expert, block_start, block_end, _, used = table
    blocks_of, _, k, _ = sizes
    ROWS: gl.constexpr = given.shape[1]
    AT_ONCE: gl.constexpr = 4 if ROWS == 16 else 1  # more would not fit in registers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    output = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    first, num_programs = gl.program_id(0), gl.num_programs(0)
    grid_wait(PDL)
    num_items = gl.load(used) * blocks_of
    turn = 0
    block = _expert(block_expert, first, blocks_of, num_items) * blocks_of + first % blocks_of
    at, end = listed_range(starts, block, output, first < num_items)
    a, b, c, d, u, v, w, z = _four_of_each(inputs, values, at, end)
    for item in range(first, num_items, num_programs):
        after = item + num_programs
        next_block = _expert(block_expert, after, blocks_of, num_items) * blocks_of + after % blocks_of
        next_at, next_end = listed_range(starts, next_block, output, after < num_items)
        group = item // blocks_of
        there = (row < gl.load(block_end + group) - gl.load(block_start + group))[None, :]
        rows = ((group * ROWS + row) * k)[None, :]
        sums = gl.zeros([64, ROWS], gl.float32, layout)
        # read here: Triton 3.6 does not carry the bound of an inner loop between iterations of the outer one
        for _ in range((gl.load(most + block) + AT_ONCE - 1) // AT_ONCE):
            if AT_ONCE == 4:
                first_x, second_x = _input_of(x, rows, a, there), _input_of(x, rows, b, there)
                third_x, fourth_x = _input_of(x, rows, c, there), _input_of(x, rows, d, there)
                sums += (u - _SENTINEL)[:, None] * first_x
                sums += (v - _SENTINEL)[:, None] * second_x
                sums += (w - _SENTINEL)[:, None] * third_x
                sums += (z - _SENTINEL)[:, None] * fourth_x
            else:
                sums += (u - _SENTINEL)[:, None] * _input_of(x, rows, a, there)
            at += AT_ONCE
            a, b, c, d, u, v, w, z = _four_of_each(inputs, values, at, end)
        at, end, block = next_at, next_end, next_block
        a, b, c, d, u, v, w, z = _four_of_each(inputs, values, at, end)
        hand_over(sums, given, handed, turn & 1)
        turn += 1  # noqa: SIM113


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
    shared, given, handed, factors, table, out, sizes, GROUP: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr
):
    """Compute every second step of each of the program's items; the first group stores the sum of both groups."""
    from_other, from_lists = given
    by_other, by_lists = handed
    ROWS: gl.constexpr = shared[0].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    block_expert, block_start, block_end, pairs, used = table
    blocks_of, steps, _, n = sizes
    weight_scales, routing, top_k, out_rank = factors
    grid_wait(PDL)
    num_items = gl.load(used) * blocks_of
    at, turn, num_programs = 0, 0, gl.num_programs(0)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    first = gl.program_id(0)
    # an item's table entries are read during the matmul of the previous item
    expert = _expert(block_expert, first, blocks_of, num_items)
    start, end = _expert(block_start, first, blocks_of, num_items), _expert(block_end, first, blocks_of, num_items)
    pair = gl.load(pairs + start + row, mask=row < end - start, other=0)
    for item in range(first, num_items, num_programs):
        tile, group, after = item % blocks_of, item // blocks_of, item + num_programs
        next_expert = _expert(block_expert, after, blocks_of, num_items)
        next_start = _expert(block_start, after, blocks_of, num_items)
        next_end = _expert(block_end, after, blocks_of, num_items)
        i = (expert * blocks_of + tile) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        scale = gl.load(weight_scales + i)
        count = end - start
        factor = gl.load(routing + pair, mask=row < count, other=0.0)
        sums = block_sums(shared, at, steps, GROUP)
        at += steps
        next_pair = gl.load(pairs + next_start + row, mask=row < next_end - next_start, other=0)
        if GROUP == 1:
            hand_over(sums, from_other, by_other, turn & 1)
        else:
            sums = take_over(sums, from_lists, by_lists, turn & 1)
            sums = take_over(sums, from_other, by_other, turn & 1)
            sums *= scale[:, None]
            if GATE:
                store_rows(gated(sums, out.dtype.element_ty, "silu"), out, group * ROWS, count, tile * 32, n)
            else:
                _scatter(sums, out, pair, factor, row < count, tile * 64, n, top_k, out_rank)
        expert, start, end, pair = next_expert, next_start, next_end, next_pair
        turn += 1  # noqa: SIM113


@gluon.jit(do_not_specialize=["blocks_of", "steps", "top_k"])
def _compact_experts(
    x, x_tiles, codes, starts, most, inputs, values, weight_scales, routing, out,
    block_expert, block_start, block_end, pairs, used, blocks_of, steps, k, n, top_k, out_rank,
    ROWS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, GATE: gl.constexpr, REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (some of the items)."""
    shared, given, handed = allocate(x_tiles, codes, ROWS, K, STAGES)
    table = (block_expert, block_start, block_end, pairs, used)
    sizes, factors, lists = (
        (blocks_of, steps, k, n),
        (weight_scales, routing, top_k, out_rank),
        (starts, most, inputs, values),
    )
    gl.warp_specialize(
        [
            (_multiply, (shared, given, handed, factors, table, out, sizes, 0, GATE, PDL)),
            (_multiply, (shared, given, handed, factors, table, out, sizes, 1, GATE, PDL)),
            (_add_listed, (x, given[1], handed[1], lists, table, sizes, PDL)),
            (_read, (x_tiles, codes, shared, table, sizes, PDL)),
        ],
        [4, 4, 1],  # warps
        [REGISTERS, REGISTERS, 24],  # registers of a thread
    )


def compact_experts(weight: torch.Tensor, *, gates: bool) -> CompactWeight | None:
    """Encode the weights of all experts [num_experts, n, k] as one weight of concatenated outputs; None if it fails.

    gates  the first n / 2 outputs of each are gates, n in 64s
    """
    num_experts, n, k = weight.shape
    if n % OUTPUTS or k % 8 or k < 2 * INPUTS or not weight.is_contiguous():
        return None
    if gates:
        weight = weight.view(num_experts, 2, n // 16, 8, k).transpose(1, 2)
    return compacted(weight.reshape(num_experts * n, k))


def _launch(
    x: torch.Tensor,
    weight: CompactWeight,
    num_experts: int,
    blocks: ExpertBlocks,
    routing: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch with x [max_blocks * pairs, k], gathered; out [max_blocks * pairs, n] or [top_k, num_tokens, n]."""
    k, gate = x.shape[1], out.dim() == 2
    blocks_of = weight.num_outputs // num_experts // OUTPUTS
    num_items = len(blocks.block_expert) * blocks_of
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    codes = TensorDescriptor(weight.codes, list(weight.codes.shape), [32, 1], [32, 32], codes_layout())
    _compact_experts[(min(num_items, num_sms),)](
        x, tiled(x, blocks.block, K), codes, weight.starts, weight.most, weight.inputs, weight.values, weight.scales,
        routing, out, blocks.block_expert, blocks.block_start, blocks.block_end, blocks.pairs, blocks.used, blocks_of,
        triton.cdiv(k, INPUTS), k, out.shape[-1], routing.shape[-1], 0 if gate else out.stride(0),
        ROWS=blocks.block, K=K, STAGES=_STAGES[blocks.block], GATE=gate, REGISTERS=_REGISTERS,
        num_warps=4, maxnreg=_REGISTERS, **pdl_options(routing),
    )  # fmt: skip


def compact_parts(
    x: torch.Tensor,
    gate_up: CompactWeight,
    down: CompactWeight,
    experts: torch.Tensor,
    scales: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Run each token of x [num_tokens, k] through its experts, with SiLU gates.

    experts  int32 [num_tokens, top_k], scales float32 likewise, both contiguous
    -> float32 [top_k, num_tokens, k], the sum over whose first dimension is the output
    """
    num_tokens, top_k = experts.shape
    block = 16 if experts.numel() <= DENSITY * num_experts else 32
    blocks = ExpertBlocks.of(experts, num_experts, block, lay_out=x)
    assert blocks.laid is not None
    hidden = torch.empty(len(blocks.laid), gate_up.num_outputs // num_experts // 2, dtype=x.dtype, device=x.device)
    _launch(blocks.laid, gate_up, num_experts, blocks, scales, hidden)
    out = torch.empty(top_k, num_tokens, down.num_outputs // num_experts, dtype=torch.float32, device=x.device)
    _launch(hidden, down, num_experts, blocks, scales, out)
    return out
