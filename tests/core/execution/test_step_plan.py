"""The part of a step that a runner gets can be sent to another process."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.execution.paged import PagedRunner
from graftlm.core.execution.serial import SerialRunner
from graftlm.core.execution.step_plan import ScheduledRow, StepPlan, build_plan
from graftlm.core.model.load import load_model
from graftlm.core.sequence import Sequence
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.kv_store import allocate_kv
from graftlm.kernels.wire_plan import Extent, WirePlan
from tests.models import byte_tokenizer, random_prompt, tiny_model
from tests.stepping import sequence_of, start


def sequences_that_share(num_shared: int) -> list[Sequence]:
    """Two sequences whose first tokens lie in the same slots, and one alone, all over slots [0, 400)."""
    shared = [Extent(0, num_shared)]
    prefix = random_prompt(num_shared, seed=1)
    found = [sequence_of(prefix + random_prompt(5 + i, seed=2 + i)) for i in range(2)]
    for i, sequence in enumerate(found):
        sequence.kv.shared, sequence.kv.num_shared = shared, num_shared
        sequence.kv.own = [Extent(200 + 50 * i, 220 + 50 * i)]
    alone = sequence_of(random_prompt(30, seed=9))
    alone.kv.own = [Extent(340, 350), Extent(300, 330)]
    return [*found, alone]


def steps_of(sequences: list[Sequence]) -> list[StepPlan]:
    """The first prompt, then the others, then a decode step in which two rows share a prefix."""
    plans = []
    for members in (sequences[:1], sequences[1:]):
        plans.append(build_plan([ScheduledRow(s, s.num_pending - 1, 0) for s in members], share_decode=True))
        for row in plans[-1].rows:
            row.sequence.progress.num_computed += row.num_new
        sequences[1].progress.num_computed = max(sequences[1].progress.num_computed, sequences[1].kv.num_shared)
    return [*plans, build_plan([ScheduledRow(s, 1, 1) for s in sequences], share_decode=True)]


def test_a_copy_that_went_through_pickle_gives_the_same_logits() -> None:
    loaded = load_model(tiny_model(), EngineConfig(device="cpu"), byte_tokenizer())
    plans = steps_of(sequences_that_share(80))
    assert [(p.length, p.rows) for p in plans[-1].wire.shared] == [(80, (0, 1))]
    found = []
    for copied in (False, True):
        runner = PagedRunner(loaded, TorchAttention(allocate_kv(loaded.kv_layout, 400, loaded.dtype)))
        for plan in plans:
            wire: WirePlan = pickle.loads(pickle.dumps(plan.wire)) if copied else plan.wire
            logits = runner.forward(wire)
        found.append(logits)
    assert found[0].shape[0] == 3
    assert torch.equal(*found)


def test_the_serial_lane_runs_a_copy_too() -> None:
    with pytest.warns(UserWarning, match="serial lane"):
        loaded = load_model(tiny_model("bloom"), EngineConfig(device="cpu"), byte_tokenizer())
    sequences = sequences_that_share(80)
    found = []
    for copied in (False, True):
        runner = SerialRunner(loaded)
        for sequence in sequences:
            sequence.progress.num_computed = 0
            start(runner, sequence)
        for row in [ScheduledRow(s, s.num_tokens, 1) for s in sequences]:
            wire = build_plan([row], share_decode=False).wire
            found.append(runner.forward(pickle.loads(pickle.dumps(wire)) if copied else wire))
    assert all(torch.equal(mine, other) for mine, other in zip(found[:3], found[3:], strict=True))


def test_a_wire_plan_holds_arrays_and_nothing_else() -> None:
    *_, plan = steps_of(sequences_that_share(80))
    kinds = {f.name: type(getattr(plan.wire, f.name)) for f in fields(WirePlan)}
    assert kinds.pop("token_sources") is type(None)
    of_pictures = [kinds.pop(name) for name in ("embedded", "grid", "until", "until_windowed")]
    assert of_pictures == [tuple, type(None), type(None), bool]
    assert set(kinds.values()) == {np.ndarray}
