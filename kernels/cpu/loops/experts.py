"""A mixture of experts on a CPU as one compiled loop: router, choice, and the experts hit, each weight read once.

Every thread runs the whole call, phase by phase, as in decoder_layers.py. Rows are ordered by expert; a task is a panel
of 64 outputs of one expert for some of its rows. Experts that no row has chosen are not read.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from graftlm.kernels.cpu import PANEL
from graftlm.kernels.cpu.calls import SIGMOID, SOFTMAX, ExpertsCall
from graftlm.kernels.cpu.compiled.object_code import MachineCode
from graftlm.kernels.cpu.element_format import ElementFormat
from graftlm.kernels.cpu.loops.arithmetic import (
    FLAGS,
    add_done,
    allocate,
    at,
    exp,
    float_array,
    gelu_mul,
    narrow,
    next_task,
    release,
    rounded,
    silu_mul,
    store_row,
    wait_until_done,
    widen,
)
from graftlm.kernels.cpu.loops.compiler import compile_loop
from graftlm.kernels.cpu.loops.matmul import dense_panel_matmul, dot_panel_matmul
from graftlm.kernels.cpu.loops.register_tiles import has_bfloat16_dots

_TASK_ROWS = 66
"""Rows of a task: whole register tiles, whose sums stay in the first-level cache."""

_SCORED = 16
"""Experts whose scores a task computes."""

_F = np.float32


@njit(forceinline=True, **FLAGS)
def _apply(scores, num, function):
    """Apply a function of a router's scores to the first `num`, in place."""
    if function == SOFTMAX:
        most = scores[0]
        for i in range(num):
            most = max(most, scores[i])
        total = _F(0)
        for i in range(num):
            scores[i] = exp(scores[i] - most)
            total += scores[i]
        for i in range(num):
            scores[i] /= total
    elif function == SIGMOID:
        for i in range(num):
            scores[i] = _F(1) / (_F(1) + exp(min(-scores[i], _F(80))))


@njit(forceinline=True, **FLAGS)
def _choose(call, scores, choice, experts, weights):
    """Choose the experts of a row from its scores, and add the shared ones; `choice` is scratch of the same length."""
    routed, top_k = call.num_experts - call.num_shared, call.top_k - call.num_shared
    _apply(scores, routed, call.score)
    for i in range(routed):
        choice[i] = scores[i]
    if call.correction != 0:
        correction = carray(at(call.correction), routed, np.float32)
        for i in range(routed):
            choice[i] += correction[i]
    for k in range(top_k):
        best = 0
        for i in range(1, routed):
            if choice[i] > choice[best]:
                best = i
        experts[k], weights[k] = best, scores[best]
        choice[best] = _F(-3e38)
    _apply(weights, top_k, call.after)
    total = call.eps
    for k in range(top_k):
        total += weights[k]
    for k in range(top_k):
        if call.renormalize != 0:
            weights[k] /= total
        weights[k] *= call.scale
    for k in range(call.num_shared):
        experts[top_k + k], weights[top_k + k] = routed + k, _F(1)
        if call.gated != 0:
            weights[top_k + k] = _F(1) / (_F(1) + exp(min(-scores[routed], _F(80))))


@njit(forceinline=True, **FLAGS)
def _order(call, starts, order, blocks):
    """Order the picks, numbers of row and expert, by expert; cut them in blocks. -> number of blocks

    starts  [num_experts + 1], scratch; order [num_picks]; blocks [most blocks, 3]: expert, first pick, number of picks
    """
    num_picks = call.num_rows * call.top_k
    experts = carray(at(call.experts), num_picks, np.int64)
    for i in range(call.num_experts + 1):
        starts[i] = 0
    for pick in range(num_picks):
        starts[experts[pick] + 1] += 1
    for i in range(call.num_experts):
        starts[i + 1] += starts[i]
    num_blocks = 0
    for expert in range(call.num_experts):
        for first in range(starts[expert], starts[expert + 1], _TASK_ROWS):
            blocks[num_blocks, 0], blocks[num_blocks, 1] = expert, first
            blocks[num_blocks, 2] = min(_TASK_ROWS, starts[expert + 1] - first)
            num_blocks += 1
    for pick in range(num_picks):
        expert = experts[pick]
        order[starts[expert]] = pick
        starts[expert] += 1
    return num_blocks


def compile_experts(number: int) -> MachineCode:
    """Compile `void (ExpertsCall *)` for format `number`."""
    weight_format = ElementFormat(number)
    element, size = weight_format.raw, weight_format.size
    dots = weight_format is ElementFormat.BFLOAT16 and has_bfloat16_dots()
    matmul = dense_panel_matmul(weight_format)
    widens = size < 4 and not dots

    @njit(forceinline=True, **FLAGS)
    def multiply(sums, rows, wide, depth, weight, num_rows):
        """Compute sums [num_rows, PANEL] of rows [num_rows, depth], elements, with a panel; `wide` is scratch."""
        if dots:
            dot_panel_matmul(sums, rows, 2 * depth, weight, num_rows, depth)
        elif size == 4:
            matmul(sums, rows, 4 * depth, weight, num_rows, depth, PANEL)
        else:
            source = carray(at(rows), num_rows * depth, element)
            to = carray(at(wide), num_rows * depth, np.float32)
            for i in range(num_rows * depth):
                to[i] = widen(source[i])
            matmul(sums, wide, 4 * depth, weight, num_rows, depth, PANEL)

    @njit(forceinline=True, **FLAGS)
    def route(call, like):
        routed, hidden, counters = call.num_experts - call.num_shared, call.hidden_size, call.counters
        scored = routed + (1 if call.gated != 0 else 0)
        parts, taken = (scored + _SCORED - 1) // _SCORED, 0
        while True:
            task = next_task(at(counters))
            if task >= call.num_rows * parts:
                break
            taken += 1
            row = task // parts
            x = carray(at(call.x + row * call.x_row * 4), hidden, np.float32)
            scores = carray(at(call.logits + row * scored * 4), scored, np.float32)
            for expert in range(task % parts * _SCORED, min((task % parts + 1) * _SCORED, scored)):
                weight = carray(at(call.router + expert * hidden * size), hidden, element)
                total = _F(0)
                for d in range(hidden):
                    total += x[d] * widen(weight[d])
                if call.rounds != 0:
                    total = rounded(total, like)
                if call.bias != 0 and expert < routed:
                    total += carray(at(call.bias), routed, np.float32)[expert]
                    if call.rounds != 0:
                        total = rounded(total, like)
                scores[expert] = total
        add_done(at(counters), taken)
        wait_until_done(counters, call.num_rows * parts)
        memory, taken = allocate(4 * scored), 0
        choice, _ = float_array(memory, (scored,))
        while True:
            row = next_task(at(counters + 16))
            if row >= call.num_rows:
                break
            taken += 1
            scores = carray(at(call.logits + row * scored * 4), scored, np.float32)
            experts = carray(at(call.experts + row * call.top_k * 8), call.top_k, np.int64)
            weights = carray(at(call.weights + row * call.top_k * 4), call.top_k, np.float32)
            _choose(call, scores, choice, experts, weights)
        release(memory)
        add_done(at(counters + 16), taken)
        wait_until_done(counters + 16, call.num_rows)

    def work(pointer):
        call = carray(pointer, 1)[0]
        num_rows, hidden, top_k, counters = call.num_rows, call.hidden_size, call.top_k, call.counters
        depth, down_depth = call.depth, call.down_depth
        num_picks, most = num_rows * top_k, num_rows * top_k // _TASK_ROWS + call.num_experts
        like = carray(at(call.out), hidden, element)
        if call.router != 0:
            route(call, like)
        numbers = allocate(8 * (call.num_experts + 1 + num_picks + 3 * most))
        starts = carray(at(numbers), call.num_experts + 1, np.int64)
        order = carray(at(numbers + 8 * (call.num_experts + 1)), num_picks, np.int64)
        blocks = carray(at(numbers + 8 * (call.num_experts + 1 + num_picks)), (most, 3), np.int64)
        num_blocks = _order(call, starts, order, blocks)

        taken = 0
        while True:
            place = next_task(at(counters + 32))
            if place >= num_picks:
                break
            taken += 1
            x = carray(at(call.x + order[place] // top_k * call.x_row * 4), depth, np.float32)
            store_row(carray(at(call.sorted + place * depth * size), depth, element), x)
        add_done(at(counters + 32), taken)
        wait_until_done(counters + 32, num_picks)

        task_rows = min(_TASK_ROWS, num_picks)
        memory = allocate(8 * task_rows * PANEL + (4 * task_rows * max(depth, down_depth) if widens else 0))
        sums, other = float_array(memory, (task_rows, PANEL))
        ups, wide = float_array(other, (task_rows, PANEL))
        panels, taken = (down_depth + PANEL - 1) // PANEL, 0
        while True:
            task = next_task(at(counters + 48))
            if task >= num_blocks * panels:
                break
            taken += 1
            block, panel = task // panels, task % panels
            expert, first, here = blocks[block, 0], blocks[block, 1], blocks[block, 2]
            place = expert * call.up_bytes + panel * PANEL * depth * size
            rows, width = call.sorted + first * depth * size, min(PANEL, down_depth - panel * PANEL)
            multiply(memory, rows, wide, depth, call.gate + place, here)
            multiply(other, rows, wide, depth, call.up + place, here)
            for row in range(here):
                to = carray(at(call.hidden + ((first + row) * down_depth + panel * PANEL) * size), width, element)
                if call.gelu != 0:
                    for j in range(width):
                        to[j] = narrow(gelu_mul(sums[row, j], ups[row, j], to), to)
                else:
                    for j in range(width):
                        to[j] = narrow(silu_mul(sums[row, j], ups[row, j], to), to)
        add_done(at(counters + 48), taken)
        wait_until_done(counters + 48, num_blocks * panels)

        panels, taken = (hidden + PANEL - 1) // PANEL, 0
        while True:
            task = next_task(at(counters + 64))
            if task >= num_blocks * panels:
                break
            taken += 1
            block, panel = task // panels, task % panels
            expert, first, here = blocks[block, 0], blocks[block, 1], blocks[block, 2]
            weight = call.down + expert * call.down_bytes + panel * PANEL * down_depth * size
            multiply(memory, call.hidden + first * down_depth * size, wide, down_depth, weight, here)
            width = min(PANEL, hidden - panel * PANEL)
            for row in range(here):
                pick = order[first + row]
                factor = carray(at(call.weights), num_picks, np.float32)[pick]
                to = carray(at(call.parts + (pick * hidden + panel * PANEL) * 4), width, np.float32)
                for j in range(width):
                    to[j] = rounded(sums[row, j], like) * factor
        release(memory)
        add_done(at(counters + 64), taken)
        wait_until_done(counters + 64, num_blocks * panels)

        taken = 0
        while True:
            row = next_task(at(counters + 80))
            if row >= num_rows:
                break
            taken += 1
            parts = carray(at(call.parts + row * top_k * hidden * 4), (top_k, hidden), np.float32)
            out = carray(at(call.out + row * hidden * size), hidden, element)
            for d in range(hidden):
                total = _F(0)
                for k in range(top_k):
                    total += parts[k, d]
                out[d] = narrow(rounded(total, out) + widen(out[d]), out) if call.add != 0 else narrow(total, out)
        release(numbers)
        add_done(at(counters + 80), taken)
        wait_until_done(counters + 80, num_rows)

    return compile_loop(ExpertsCall, work)
