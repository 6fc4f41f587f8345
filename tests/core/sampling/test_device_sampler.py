"""The sampler that leaves tokens on the device draws what the ordinary sampler draws."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from graftlm.core.config import SamplingParams
from graftlm.core.errors import EngineError
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request
from graftlm.core.sampling.device_sampler import DeviceSampler
from graftlm.core.sampling.distributions import Needs, draw, drawing
from graftlm.core.sampling.sampler import Sampler, SampleRow
from graftlm.core.sampling.step_masks import StepMasks
from graftlm.core.sequence import Bounds, Sequence

VOCAB = 97
CPU = torch.device("cpu")
NO_MASKS = StepMasks([], np.zeros((0, -(-VOCAB // 32)), np.int32))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def sequence_of(seed: int, *, ahead: int = 0, output: int = 0, **sampling: Any) -> Sequence:
    tokens = array("i", [0] * (1 + output))
    sequence = Sequence(
        Request([0], SamplingParams(**sampling)), PromptInput(np.array([0])), tokens=tokens, bounds=Bounds(seed=seed)
    )
    sequence.progress.num_in_flight = ahead
    return sequence


def packed(ids: list[int]) -> np.ndarray:
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


masks = st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1).map(lambda ids: packed(sorted(ids)))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**40), masks), min_size=1, max_size=9))
def test_both_samplers_draw_the_same_tokens(wanted: list[tuple[dict[str, Any], int, np.ndarray | None]]) -> None:
    torch.manual_seed(len(wanted))
    logits = torch.randn(len(wanted), VOCAB) * 3
    rows = [SampleRow(sequence_of(seed, **kind), mask) for kind, seed, mask in wanted]
    device = DeviceSampler(16, CPU)
    limited = {i: mask for i, (_, _, mask) in enumerate(wanted) if mask is not None}
    side_by_side = StepMasks(list(limited), np.array([packed([]), *limited.values()])[1:])
    drawn = device.draw(logits.clone(), [one.sequence for one in rows], side_by_side).result()
    expected = Sampler(VOCAB, []).sample(logits, rows)
    assert drawn == [answer[0].token_id for answer in expected if isinstance(answer, list)]
    assert device.tokens[: len(rows)].tolist() == drawn


def test_a_token_that_is_on_its_way_counts_for_the_next_ones_randomness() -> None:
    logits = torch.zeros(1, VOCAB)
    known = DeviceSampler(1, CPU).draw(logits, [sequence_of(5, output=3)], NO_MASKS).result()
    assert DeviceSampler(1, CPU).draw(logits, [sequence_of(5, output=1, ahead=2)], NO_MASKS).result() == known


@pytest.mark.parametrize(("value", "words"), [("nan", "not finite"), ("inf", "not finite"), ("-inf", "no token is")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_token_gets_its_error_alone(value: str, words: str, temperature: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0] = float(value)
    logits[1, 4] = 99.0
    sampler = DeviceSampler(2, CPU)
    sequences = [sequence_of(seed, temperature=temperature) for seed in (1, 2)]
    bad, good = sampler.draw(logits, sequences, NO_MASKS).result()
    assert isinstance(bad, EngineError) and words in str(bad)
    assert (good, sampler.tokens.tolist()) == (4, [0, 4])


@pytest.mark.parametrize(
    "sampling", [{"logprobs": True}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"min_tokens": 2}]
)
def test_rows_that_need_the_host_are_not_taken(sampling: dict[str, Any]) -> None:
    assert not DeviceSampler(1, CPU).takes(sequence_of(0, **sampling))
    assert DeviceSampler(1, CPU).takes(sequence_of(0, output=1, ahead=1, min_tokens=2))


def test_a_temperature_that_float32_holds_as_zero_used_to_draw_by_chance() -> None:
    values = torch.tensor([[0.5, 2.0, 1.0]])
    params, uniforms = drawing([sequence_of(0, temperature=1e-320), sequence_of(0, temperature=1e308)])
    assert bool((params[:, 0] > 0).all()) and bool(params.isfinite().all())
    needs = Needs.of(SamplingParams(temperature=1e-320), few=False, masked=False)
    assert draw(values, values.amax(dim=1), params[:1], uniforms[:1], needs).tolist() == [[1]]
