"""What a step looks like on the device."""

from __future__ import annotations

import numpy as np
import torch

from graftlm.core.execution.step_plan import ScheduledRow, build_plan
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request
from graftlm.core.sequence import Sequence
from graftlm.kernels.gpu.attention.step_buffers import DeviceStep
from graftlm.kernels.wire_plan import Extent, WirePlan
from tests.kernels.compiling import run_compiler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCRATCH = 99


def sequence_of(num_tokens: int, *own: tuple[int, int]) -> Sequence:
    sequence = Sequence(Request([1]), PromptInput(np.arange(num_tokens, dtype=np.int32)))
    sequence.kv.own = [Extent(*extent) for extent in own]
    return sequence


def plan_of(*rows: tuple[Sequence, int]) -> WirePlan:
    for sequence, num_new in rows:
        sequence.progress.num_computed = sequence.num_tokens - num_new
    return build_plan([ScheduledRow(sequence, num_new, 1) for sequence, num_new in rows], share_decode=False).wire


def step_of(rows: int = 8, tokens: int = 8) -> DeviceStep:
    return DeviceStep(rows, tokens, 16, SCRATCH, DEVICE)


def slots(step: DeviceStep, row: int) -> list[int]:
    """The slots that a row of the step sees."""
    return step.table[int(step.rows[row]), : int(step.lens[row])].tolist()


def test_decode_rows_see_all_their_tokens_and_padding_sees_the_scratch_slot() -> None:
    step = step_of()
    layout = step.write(plan_of((sequence_of(3, (10, 14)), 1), (sequence_of(4, (20, 22), (30, 40)), 1)), padded_rows=4)
    assert [slots(step, row) for row in range(4)] == [[10, 11, 12], [20, 21, 30, 31], [SCRATCH], [SCRATCH]]
    assert step.slots[:4].tolist() == [12, 31, SCRATCH, SCRATCH]
    assert (layout.num_rows, layout.num_decode, layout.max_new) == (2, 2, 1)


def test_new_tokens_as_rows_see_those_before_them() -> None:
    step = step_of()
    layout = step.write(plan_of((sequence_of(2, (50, 54)), 1), (sequence_of(5, (10, 18)), 3)), token_rows=True)
    assert [slots(step, row) for row in range(4)] == [[50, 51], [10, 11, 12], [10, 11, 12, 13], [10, 11, 12, 13, 14]]
    assert (layout.num_rows, layout.num_decode, layout.max_new) == (4, 4, 1)


def test_a_table_for_fewer_sequences_than_rows_pads_with_its_last_row() -> None:
    step = DeviceStep(8, 8, 16, SCRATCH, DEVICE, 2)
    sequences = [sequence_of(3, (10, 14)), sequence_of(4, (20, 24))]
    step.write(plan_of((sequences[0], 2), (sequences[1], 3)), padded_rows=8, token_rows=True)
    assert [slots(step, row) for row in (1, 4, 5, 7)] == [[10, 11, 12], [20, 21, 22, 23], [SCRATCH], [SCRATCH]]


def test_a_sequence_keeps_its_row_of_the_table_while_its_slots_stay() -> None:
    step = step_of()
    first, second = sequence_of(3, (10, 18)), sequence_of(2, (20, 28))
    step.write(plan_of((first, 1), (second, 1)))
    seats = step.rows[:2].tolist()
    first.tokens.append(7), second.tokens.append(7)
    step.write(plan_of((second, 1), (first, 1)))
    assert step.rows[:2].tolist() == seats[::-1]
    assert slots(step, 1) == [10, 11, 12, 13]


def test_slots_that_change_are_written_again() -> None:
    step = step_of(rows=2)
    sequence = sequence_of(3, (10, 14))
    step.write(plan_of((sequence, 1)))
    sequence.kv.own = [Extent(40, 44)]
    step.write(plan_of((sequence, 1), (sequence_of(2, (60, 64)), 1)))
    assert [slots(step, row) for row in range(2)] == [[40, 41, 42], [60, 61]]


def test_more_sequences_than_rows_take_turns() -> None:
    step = step_of(rows=2)
    sequences = [sequence_of(2, (10 * i, 10 * i + 4)) for i in range(5)]
    for a, b in [(0, 1), (2, 1), (3, 4), (0, 1)]:
        step.write(plan_of((sequences[a], 1), (sequences[b], 1)))
        assert [slots(step, row) for row in range(2)] == [[10 * a, 10 * a + 1], [10 * b, 10 * b + 1]]


def test_a_token_that_is_still_being_drawn_is_fed_from_the_last_step() -> None:
    step = step_of()
    sequence = sequence_of(3, (10, 18))
    sequence.progress.num_computed, sequence.progress.num_in_flight, sequence.progress.pending_index = 3, 1, 5
    step.write(build_plan([ScheduledRow(sequence, 1, 1)], share_decode=False).wire, padded_rows=2)
    assert (step.sources[:2].tolist(), step.positions[:1].tolist()) == ([5, -1], [3])


def test_prompts_behind_any_number_of_decode_rows_launch_the_same_kernels() -> None:
    """A kernel that was compiled for the place of a step's numbers stopped a running engine for two seconds."""
    program = """
from graftlm.kernels.gpu.attention import extend, one_order
for kernel in (extend._extend, one_order._attend):
    print(",".join(one.name for one in kernel.params if one.do_not_specialize_on_alignment))
"""
    assert run_compiler(program) == ["rows,lens,indptr,until"] * 2
