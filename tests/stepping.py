"""Runners without an engine: sequences, plans and greedy decoding, for tests of the model layer."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from graftlm.core.execution.paged import PagedRunner
from graftlm.core.execution.serial import SerialRunner
from graftlm.core.execution.step_plan import ScheduledRow, build_plan
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request
from graftlm.core.sequence import Sequence
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.kv_store import allocate_kv
from graftlm.kernels.wire_plan import RESERVED, Extent


def sequence_of(prompt: Seq[int], namespace: str = "") -> Sequence:
    return Sequence(Request(list(prompt), namespace=namespace), PromptInput(np.array(prompt, dtype=np.int32)))


def paged_greedy(loaded: LoadedModel, prompts: Seq[Seq[int]], num_new: int, chunk: int = 1000) -> list[list[int]]:
    """Decode all prompts in one ragged batch, `chunk` prompt tokens at a time, each in two ranges of slots."""
    store = allocate_kv(loaded.kv_layout, sum(len(p) + num_new + 2 for p in prompts), loaded.dtype, loaded.device)
    pool = loaded.states.pool(RESERVED + len(prompts), loaded.device) if loaded.states is not None else None
    runner = PagedRunner(loaded, TorchAttention(store), states=pool)
    sequences, place = [], 0
    for number, prompt in enumerate(prompts):
        sequence = sequence_of(prompt)
        sequence.kv.state = RESERVED + number  # zeros, as the pool has just been allocated
        cut = place + min(5, len(prompt))
        sequence.kv.own = [Extent(place, cut), Extent(cut + 1, place + len(prompt) + num_new + 1)]
        place += len(prompt) + num_new + 2
        sequences.append(sequence)
    while running := [s for s in sequences if s.num_generated < num_new]:
        rows = [ScheduledRow(s, min(chunk, s.num_pending), int(s.num_pending <= chunk)) for s in running]
        plan = build_plan(rows, share_decode=True)
        slots = np.array([row.sequence.kv.state for row in plan.rows])
        logits = iter(runner.forward(replace(plan.wire, state_slots=slots)))
        for row, num_logits in zip(plan.rows, plan.num_logits_per_row, strict=True):
            row.sequence.progress.num_computed += row.num_new
            if num_logits:
                row.sequence.tokens.append(int(next(logits).argmax()))
    return [s.output_ids for s in sequences]


def start(runner: SerialRunner, sequence: Sequence) -> int:
    """Have a runner take in a sequence. -> how many of its tokens it has a snapshot of"""
    num_prompt, first_logit = sequence.num_prompt_tokens, sequence.first_logit
    return runner.start(
        sequence.number, sequence.ids, sequence.request.namespace, first_logit=first_logit, num_prompt=num_prompt
    )


def serial_greedy(runner: SerialRunner, prompt: Seq[int], num_new: int, chunk: int = 1000) -> tuple[list[int], int]:
    """Decode one prompt and publish it as an engine would.

    -> the new tokens, and how many tokens of the prompt were reused.
    """
    sequence = sequence_of(prompt)
    sequence.kv.own = [Extent(0, len(prompt) + num_new)]
    sequence.progress.num_computed = reused = start(runner, sequence)
    while sequence.num_generated < num_new:
        row = ScheduledRow(sequence, min(chunk, sequence.num_pending), int(sequence.num_pending <= chunk))
        logits = runner.forward(build_plan([row], share_decode=False).wire)
        sequence.progress.num_computed += row.num_new
        if row.num_logits:
            if sequence.num_generated == 0:
                runner.publish(sequence.number)
            sequence.tokens.append(int(logits[0].argmax()))
    runner.publish(sequence.number)
    runner.release(sequence.number)
    return sequence.output_ids, reused
