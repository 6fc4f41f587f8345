from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.execution.serial import SerialRunner, SnapshotStore
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model.load import load_model
from tests.models import TURNED_PAGED, byte_tokenizer, greedy_reference, random_prompt, tiny_model
from tests.stepping import sequence_of, serial_greedy, start

KINDS = ["bloom", "mpt", "mamba", "mamba2", "jamba", "rwkv", "gptj", "falcon"]
"""Biases inside the attention, recurrent states of several kinds, attention of their own."""


def load(kind: str, **overrides: Any) -> LoadedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(tiny_model(kind, **overrides), EngineConfig(device="cpu"), byte_tokenizer())


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TURNED_PAGED])
def test_tokens_equal_those_of_generate_with_and_without_snapshots(kind: str) -> None:
    loaded, reference = load(kind), tiny_model(kind)
    assert loaded.lane == "serial"
    system = random_prompt(40, seed=77)
    prompts = [system + random_prompt(n, seed=n) for n in (3, 5, 9)] + [random_prompt(9, seed=3)]
    expected = [greedy_reference(reference, prompt, 6) for prompt in prompts]
    for runner, chunk in (
        (SerialRunner(loaded), 1000),
        (SerialRunner(loaded), 11),
        (SerialRunner(loaded, max_snapshots=0), 1000),
    ):
        assert [serial_greedy(runner, prompt, 6, chunk)[0] for prompt in prompts] == expected


def test_a_chunk_or_a_snapshot_used_to_have_the_rotary_frequencies_of_its_own_length() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)], "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    runner = SerialRunner(load("llama", rope_parameters=rope), stretches_at=32)
    prefix = random_prompt(20)
    for prompt in (prefix, prefix + random_prompt(60, seed=1), prefix + random_prompt(30, seed=2)):
        expected = greedy_reference(tiny_model("llama", rope_parameters=rope), prompt, 6)
        assert [serial_greedy(runner, prompt, 6, chunk)[0] for chunk in (1000, 25)] == [expected] * 2


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_an_answer_that_grows_over_the_original_context_is_that_of_generate(family: str) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)], "factor": 8.0}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, **factors}
    options = {"rope_parameters": rope, "original_max_position_embeddings": 32}
    runner, model = SerialRunner(load(family, **options), stretches_at=32), tiny_model(family, **options)
    for length in (20, 31, 32, 33):
        prompt = random_prompt(length)
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert serial_greedy(runner, prompt, 20)[0] == whole[0, length:].tolist()


def test_a_prompt_that_was_seen_before_is_continued_from_its_snapshot() -> None:
    runner = SerialRunner(load("bloom"))
    prompt = random_prompt(30)
    answer, reused = serial_greedy(runner, prompt, 4)
    assert reused == 0
    _, reused = serial_greedy(runner, [*prompt, *answer, 1, 2, 3], 4)
    assert reused == 33  # all but the last token of the answer were computed


def test_the_place_where_two_prompts_part_serves_the_third() -> None:
    runner = SerialRunner(load("mamba2"))
    system = random_prompt(40, seed=77)
    reused = [serial_greedy(runner, [*system, 100 + i, *random_prompt(5, seed=i)], 2)[1] for i in range(3)]
    assert reused == [0, 0, 40]


def test_a_model_that_can_only_add_single_tokens_starts_afresh_on_a_long_rest() -> None:
    runner = SerialRunner(load("mamba"))
    assert runner.extension == "tokens"
    prompt = random_prompt(40)
    serial_greedy(runner, prompt, 1)
    assert start(runner, sequence_of([*prompt, *random_prompt(6, seed=1)])) == 40
    assert start(runner, sequence_of([*prompt, *random_prompt(36, seed=1)])) == 0


def test_namespaces_share_no_snapshot() -> None:
    runner = SerialRunner(load("bloom"))
    prompt = random_prompt(20)
    runner.snapshots.add(np.array(prompt, dtype=np.int32), "tenant", torch.zeros(4))
    assert start(runner, sequence_of([*prompt, 1], namespace="tenant")) == 20
    assert start(runner, sequence_of([*prompt, 1])) == 0


def test_a_snapshot_that_was_dropped_meanwhile_is_computed_again() -> None:
    from graftlm.core.execution.step_plan import ScheduledRow, build_plan
    from graftlm.kernels.wire_plan import Extent

    loaded = load("bloom")
    prompt = random_prompt(20)
    sequence = sequence_of(prompt)
    sequence.kv.own = [Extent(0, 20)]
    runner = SerialRunner(loaded)
    runner.snapshots.add(sequence.prompt_ids[:12], "", torch.zeros(1))
    sequence.progress.num_computed = start(runner, sequence)
    assert sequence.progress.num_computed == 12
    runner.snapshots = SnapshotStore(8, 1000)
    logits = runner.forward(build_plan([ScheduledRow(sequence, 8, 1)], share_decode=False).wire)
    with torch.inference_mode():
        expected = tiny_model("bloom")(torch.tensor([prompt])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_logits_come_for_several_tokens_when_scoring() -> None:
    from graftlm.core.execution.step_plan import ScheduledRow, build_plan
    from graftlm.kernels.wire_plan import Extent

    for kind in ("bloom", "mamba"):
        sequence = sequence_of(random_prompt(20))
        sequence.kv.own = [Extent(0, 20)]
        runner = SerialRunner(load(kind))
        start(runner, sequence)
        logits = runner.forward(build_plan([ScheduledRow(sequence, 20, 5)], share_decode=False).wire)
        with torch.inference_mode():
            expected = tiny_model(kind)(torch.tensor([sequence.tokens.tolist()])).logits[0, -5:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_release_drops_the_cache_of_a_sequence() -> None:
    sequence = sequence_of([1, 2, 3])
    runner = SerialRunner(load("bloom"))
    start(runner, sequence)
    assert list(runner._states) == [sequence.number]
    runner.release(sequence.number)
    assert runner._states == {}


# -- the store ----------------------------------------------------------------------------------------------------


def test_the_longest_snapshot_that_begins_the_tokens_is_found() -> None:
    store = SnapshotStore(8, 1000)
    for tokens in (ids(1), ids(1, 2, 3), ids(1, 2, 3, 4, 5), ids(1, 2, 9)):
        store.add(tokens, "", torch.zeros(1))
    found = store.longest(ids(1, 2, 3, 4), "")
    assert found is not None
    assert found.tokens.tolist() == [1, 2, 3]
    assert store.longest(ids(7), "") is None
    assert store.branch(ids(1, 2, 3, 4, 8), "") == 4


def test_the_least_recently_used_snapshot_goes_first() -> None:
    store = SnapshotStore(2, 1000)
    store.add(ids(1), "", torch.zeros(1))
    store.add(ids(2), "", torch.zeros(1))
    store.longest(ids(1, 5), "")
    store.add(ids(3), "", torch.zeros(1))
    assert [store.longest(ids(i), "") is not None for i in (1, 2, 3)] == [True, False, True]


def test_snapshots_are_bounded_in_bytes_whatever_holds_the_tensors() -> None:
    store = SnapshotStore(100, 100)
    store.add(ids(1), "", {"layers": [torch.zeros(10), (torch.zeros(5),)]})
    assert store.num_bytes == 60
    store.add(ids(2), "", torch.zeros(20))
    assert (len(store), store.num_bytes) == (1, 80)
    store.add(ids(3), "", torch.zeros(26))
    assert (len(store), store.num_bytes) == (1, 80)


def test_a_snapshot_does_not_change_when_its_cache_does() -> None:
    store, cache = SnapshotStore(2, 1000), {"state": torch.zeros(2)}
    store.add(ids(1), "", cache)
    cache["state"] += 1
    found = store.longest(ids(1), "")
    assert found is not None
    assert copy.copy(found.cache)["state"].tolist() == [0, 0]
