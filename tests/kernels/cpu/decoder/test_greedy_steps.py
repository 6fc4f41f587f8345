"""Several decode steps in one call give what single steps give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.execution.paged import PagedRunner
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.qualify import probe_plan
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.kv_store import KVStore
from graftlm.kernels.wire_plan import Extent, SharedPrefix, WirePlan
from tests.kernels.cpu.decoder.test_decoder_stack import filled, load, pytestmark  # noqa: F401

STEPS = 5


def runner_of(loaded: LoadedModel) -> tuple[PagedRunner, KVStore]:
    store = filled(loaded)
    return PagedRunner(loaded, TorchAttention(store)), store


def plan_at(step: int, pasts: Sequence[int], ids: Sequence[int] | None = None) -> WirePlan:
    """Rows of one new token each after `pasts` + step tokens; the newest lies in the second of two ranges of slots."""
    places, sequences, start = [], [], 0
    for row, past in enumerate(pasts):
        half = past // 2
        places.append([Extent(start, start + half), Extent(start + half + 3, start + past + 3 + STEPS)])
        sequences.append([(7 * row + i) % 250 for i in range(past + step)] + [ids[row] if ids is not None else 9])
        start += past + 3 + STEPS
    return probe_plan(sequences, tuple(places), [(past + step, past + step + 1) for past in pasts])


def one_by_one(loaded: LoadedModel, pasts: Sequence[int], change: Any = lambda plan: plan) -> tuple[Any, KVStore]:
    runner, store = runner_of(loaded)
    tokens: list[list[int]] = []
    for step in range(STEPS):
        logits = runner.forward(change(plan_at(step, pasts, tokens[-1] if tokens else None)))
        tokens.append(logits.float().numpy().argmax(axis=1).tolist())
    return np.array(tokens), store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "config"), [("llama", {"tie_word_embeddings": True}), ("qwen3", {}), ("mistral", {"sliding_window": 99})]
)
@pytest.mark.parametrize("pasts", [[5], [17, 1, 64]])
def test_they_choose_the_tokens_and_store_the_keys_of_single_steps(
    kind: str, config: dict[str, Any], dtype: torch.dtype, pasts: list[int]
) -> None:
    loaded = load(kind, dtype, **config)
    expected, theirs = one_by_one(loaded, pasts)
    runner, ours = runner_of(loaded)
    tokens = runner.decode(plan_at(0, pasts), [[]] * len(pasts), STEPS)
    assert tokens is not None
    assert tokens.tolist() == expected.tolist()
    for mine, other in zip([*ours.k, *ours.v], [*theirs.k, *theirs.v], strict=True):
        assert torch.equal(mine, other)


def test_rows_that_share_a_prefix_go_on_sharing_it() -> None:
    def shared(plan: WirePlan) -> WirePlan:
        rows = [
            row._replace(extents=(Extent(0, 66), Extent(80 + 20 * i, 100 + 20 * i))) for i, row in enumerate(plan.rows)
        ]
        return WirePlan.of(rows, plan.input_ids.tolist(), plan.logits_rows.tolist(), [SharedPrefix(66, (0, 2))])

    loaded, pasts = load(), [70, 68, 66]
    expected, _ = one_by_one(loaded, pasts, shared)
    tokens = runner_of(loaded)[0].decode(shared(plan_at(0, pasts)), [[]] * 3, STEPS)
    assert tokens is not None
    assert tokens.tolist() == expected.tolist()


def test_the_step_after_which_a_row_has_ended_is_the_last() -> None:
    loaded, pasts = load(), [17, 1, 64]
    expected, _ = one_by_one(loaded, pasts)
    end = int(expected[1, 2])
    last = next(i for i in range(STEPS) if expected[i, 2] == end)
    tokens = runner_of(loaded)[0].decode(plan_at(0, pasts), [[], [1000], [1000, end]], STEPS)
    assert tokens is not None
    assert tokens.tolist() == expected[: last + 1].tolist()


def test_an_interrupt_ends_them_with_the_step_under_way() -> None:
    runner, _ = runner_of(load())
    runner.interrupt[0] = 1
    tokens = runner.decode(plan_at(0, [17, 1]), [[], []], STEPS)
    assert tokens is not None
    assert len(tokens) == 1


def test_logits_that_are_not_finite_end_them() -> None:
    loaded = load()
    runner, store = runner_of(loaded)
    store.v[0][2] = torch.nan  # the second row does not see it
    tokens = runner.decode(plan_at(0, [17, 1]), [[], []], STEPS)
    assert tokens is not None
    assert len(tokens) == 1
    assert tokens[0, 0] == -1
    assert tokens[0, 1] >= 0


def test_a_window_that_a_row_outgrows_is_left_to_single_steps() -> None:
    loaded = load("mistral", sliding_window=16)
    assert runner_of(loaded)[0].decode(plan_at(0, [12]), [[]], STEPS) is None
    assert runner_of(loaded)[0].decode(plan_at(0, [11]), [[]], STEPS) is not None
