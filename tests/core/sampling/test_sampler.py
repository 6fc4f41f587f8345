from __future__ import annotations

import math
from array import array
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from graftlm.core.config import SamplingParams
from graftlm.core.errors import ConfigError, EngineError
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Request
from graftlm.core.sampling.sampler import Sampled, Sampler, SampleRow, score_logprobs, unpack_masks
from graftlm.core.sequence import Bounds, Sequence

EOS = 3
SAMPLER = Sampler(4, [EOS])
LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def row(
    mask: np.ndarray | None = None,
    *,
    output: list[int] | None = None,
    seed: int = 0,
    index: int = 0,
    n: int = 1,
    **sampling: Any,
) -> SampleRow:
    request = Request([0], SamplingParams(**sampling))
    tokens = array("i", [0, *(output or [])])
    return SampleRow(
        Sequence(request, PromptInput(np.array([0])), index=index, tokens=tokens, bounds=Bounds(seed=seed)), mask, n
    )


def packed(ids: list[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def token(logits: torch.Tensor, one: SampleRow, vocab_size: int = 4) -> int:
    (answer,) = Sampler(vocab_size, [EOS]).sample(logits, [one])
    assert isinstance(answer, list)
    return answer[0].token_id


def counts(num_draws: int = 2000, **sampling: Any) -> Counter[int]:
    rows = [row(seed=seed, **sampling) for seed in range(num_draws)]
    answers = SAMPLER.sample(LOGITS.expand(num_draws, -1), rows)
    return Counter(answer[0].token_id for answer in answers if isinstance(answer, list))


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0], [5.0, 2.0, 1.0, 0.0]], dtype=torch.bfloat16)
    assert SAMPLER.sample(logits, [row(temperature=0), row(temperature=0)]) == [[Sampled(1)], [Sampled(0)]]


def test_sampled_tokens_follow_the_distribution() -> None:
    drawn = counts()
    for token_id, share in enumerate([0.4, 0.3, 0.2, 0.1]):
        assert abs(drawn[token_id] / 2000 - share) < 0.04  # 3.6 standard deviations of the widest


def test_temperature_sharpens() -> None:
    assert counts(temperature=0.1)[0] / 2000 > 0.9  # 0.4^10 against 0.3^10


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(counts(top_k=2)) == {0, 1}
    assert set(counts(top_k=-1)) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert set(counts(top_p=0.65)) == {0, 1}
    assert set(counts(top_p=0.75)) == {0, 1, 2}
    assert set(counts(top_p=1e-9)) == {0}


def test_top_p_is_a_share_of_what_top_k_leaves() -> None:
    assert set(counts(top_k=3, top_p=0.75)) == {0, 1}  # 0.4 / 0.9, 0.7 / 0.9: the second passes 0.75


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    assert set(counts(min_p=0.6)) == {0, 1}
    assert set(counts(min_p=0.4, top_k=2)) == {0, 1}


def test_a_flat_nucleus_reaches_beyond_the_likeliest_tokens() -> None:
    flat = torch.zeros(300, 3000)
    answers = Sampler(3000, []).sample(flat, [row(seed=seed, top_p=0.9) for seed in range(300)])
    ids = {answer[0].token_id for answer in answers if isinstance(answer, list)}
    assert len(ids) > 250


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=6), st.data())
def test_a_draw_does_not_depend_on_the_batch(seeds: list[int], data: st.DataObject) -> None:
    logits = torch.randn(len(seeds), 100, generator=torch.Generator().manual_seed(seeds[0] % 1000))
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"mask": packed([1, 5, 7], 100)},
        {"mask": packed([1, 5, 7], 100), "top_k": 5},
        {"mask": packed(list(range(50)), 100), "top_k": 5, "top_p": 0.9},
        {"temperature": 0},
        {"frequency_penalty": 1.0, "output": [1, 1]},
    ]
    rows = [row(seed=seed, **data.draw(st.sampled_from(kinds))) for seed in seeds]
    together = Sampler(100, []).sample(logits, rows)
    alone = [Sampler(100, []).sample(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    assert together == alone


def test_draws_differ_by_seed_position_and_sample() -> None:
    flat = torch.zeros(1, 4096)
    base = row(seed=1)
    others = [row(seed=2), row(seed=1, output=[5]), row(seed=1, index=1)]
    assert len({token(flat, one, 4096) for one in [base, *others]}) == 4


def test_samples_of_one_prefill_are_those_of_its_forks() -> None:
    flat = torch.zeros(1, 4096)
    (answer,) = Sampler(4096, []).sample(flat, [row(seed=7, n=3)])
    assert isinstance(answer, list)
    assert [s.token_id for s in answer] == [token(flat, row(seed=7, index=i), 4096) for i in range(3)]


def test_greedy_samples_are_equal() -> None:
    assert SAMPLER.sample(LOGITS, [row(n=2, temperature=0)]) == [[Sampled(0), Sampled(0)]]


@pytest.mark.parametrize("allowed", [[5, 40, 99], list(range(1, 100))], ids=["few", "many"])
@pytest.mark.parametrize("few_words", [256, 1])
def test_a_mask_leaves_only_allowed_tokens(monkeypatch: pytest.MonkeyPatch, allowed: list[int], few_words: int) -> None:
    monkeypatch.setattr("graftlm.core.sampling.sampler.FEW_WORDS", few_words)
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    best = max(allowed, key=lambda i: logits[0, i].item())
    assert token(logits, row(packed(allowed, 100), temperature=0), 100) == best
    drawn = {token(logits, row(packed(allowed, 100), seed=seed), 100) for seed in range(100)}
    assert drawn <= set(allowed) and len(drawn) > 1


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    answers = SAMPLER.sample(LOGITS.expand(2, -1), [row(packed([], 4), output=[1]), row(temperature=0)])
    assert isinstance(answers[0], EngineError) and "no token is allowed after 1 generated" in str(answers[0])
    assert answers[1] == [Sampled(0)]


@pytest.mark.parametrize("kind", [{"temperature": 0}, {}], ids=["greedy", "sampled"])
def test_a_row_of_nan_fails_alone(kind: dict[str, Any]) -> None:
    logits = torch.stack([torch.full((4,), math.nan), LOGITS[0]])
    answers = SAMPLER.sample(logits, [row(**kind), row(**kind)])
    assert isinstance(answers[0], EngineError) and "not finite" in str(answers[0])
    assert isinstance(answers[1], list)


def test_repetition_penalty_lowers_seen_tokens_of_prompt_and_answer() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.5, -1.2]])
    assert token(logits, row(temperature=0, repetition_penalty=1.5)) == 2  # 0 is the prompt: 2 / 1.5 < 1.5
    after = row(temperature=0, repetition_penalty=1.5, output=[2, 1])
    assert token(torch.tensor([[-1.0, -1.0, -1.0, -1.2]]), after) == 3  # negative logits go down, not up


def test_frequency_and_presence_penalties_count_the_answer_alone() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0, 0.0]])
    assert token(logits, row(temperature=0, presence_penalty=2.0)) == 0  # 0 is in the prompt only
    assert token(logits, row(temperature=0, presence_penalty=0.2, output=[0])) == 1
    assert token(logits, row(temperature=0, frequency_penalty=0.09, output=[0])) == 0
    assert token(logits, row(temperature=0, frequency_penalty=0.09, output=[0, 0])) == 1


def test_logit_bias_moves_and_forbids() -> None:
    assert token(LOGITS, row(temperature=0, logit_bias={2: 5.0})) == 2
    assert token(LOGITS, row(temperature=0, logit_bias={0: -math.inf})) == 1


def test_a_bias_on_an_unknown_id_fails_its_row_alone() -> None:
    answers = SAMPLER.sample(LOGITS.expand(2, -1), [row(logit_bias={9: 1.0}), row(temperature=0)])
    assert isinstance(answers[0], ConfigError) and "token id 9; ids are 0 to 3" in str(answers[0])
    assert answers[1] == [Sampled(0)]


def test_min_tokens_forbids_the_end_until_it_is_reached() -> None:
    ending = torch.tensor([[0.0, 0.5, 1.0, 9.0]])
    assert token(ending, row(temperature=0, min_tokens=2, output=[1])) == 2
    assert token(ending, row(temperature=0, min_tokens=2, stop_token_ids=(2,), output=[1])) == 1
    assert token(ending, row(temperature=0, min_tokens=2, output=[1, 1])) == EOS


def test_a_finished_constraint_ends_the_text_before_min_tokens() -> None:
    assert token(LOGITS, row(packed([EOS], 4), temperature=0, min_tokens=5)) == EOS
    assert token(LOGITS, row(packed([2, EOS], 4), temperature=0, min_tokens=5)) == 2


def test_logprobs_are_those_of_the_model_before_filters_and_masks() -> None:
    one = row(packed([1, 2], 4), temperature=0, logprobs=True, top_logprobs=2, logit_bias={1: 3.0})
    ((sampled,),) = SAMPLER.sample(LOGITS, [one])
    assert sampled.token_id == 1
    assert sampled.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [i for i, _ in sampled.top] == [0, 1]
    assert [value for _, value in sampled.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_rows_report_only_what_they_asked_for() -> None:
    rows = [row(temperature=0), row(temperature=0, logprobs=True), row(temperature=0, top_logprobs=1)]
    plain, chosen, top = SAMPLER.sample(LOGITS.expand(3, -1), rows)
    assert plain == [Sampled(0)]
    assert isinstance(chosen, list) and chosen[0].logprob is not None and chosen[0].top == ()
    assert isinstance(top, list) and len(top[0].top) == 1


def test_logits_are_not_changed() -> None:
    logits = LOGITS.clone()
    SAMPLER.sample(logits, [row(packed([1], 4), logit_bias={1: 2.0}, min_tokens=2, top_p=0.5)])
    assert torch.equal(logits, LOGITS)


def test_a_short_mask_allows_nothing_beyond_its_end() -> None:
    mask = unpack_masks([np.array([-1], dtype=np.int32)], 40, torch.device("cpu"))
    assert mask.tolist() == [[True] * 32 + [False] * 8]


def test_scores_are_logprobs_of_given_tokens() -> None:
    scored = score_logprobs(LOGITS.expand(2, -1), [1, 3])
    assert [one.token_id for one in scored] == [1, 3]
    assert [one.logprob for one in scored] == pytest.approx([math.log(0.3), math.log(0.1)], abs=1e-6)


def test_scores_have_the_likeliest_tokens_beside_them() -> None:
    (scored,) = score_logprobs(LOGITS[:1], [3], num_top=2)
    assert [token_id for token_id, _ in scored.top] == LOGITS[0].topk(2).indices.tolist()
    assert scored.top[0][1] == pytest.approx(float(LOGITS[0].log_softmax(0).max()), abs=1e-6)
