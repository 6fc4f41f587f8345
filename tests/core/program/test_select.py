from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.errors import ConfigError, EngineError
from graftlm.core.program.select import METHODS, ChoiceTrie, check_choices, decide, submit_select, tokenize_choices
from graftlm.core.prompt_input import PromptInput
from graftlm.core.request import Completion, Request, TokenLogprob, Usage
from graftlm.core.runtime import Runtime
from graftlm.core.text.processor import TextProcessor
from graftlm.core.text.tokenizer import Tokenizer
from tests.models import BOS, byte_tokenizer, tiny_model

MERGES = [("Ġ", "A"), ("o", "r"), ("g", "a"), ("ga", "n"), ("or", "gan")]


# Three options that each method ranks differently: one short, one that begins as the short one, one long.
SHORT, LONGER, LONG = 0, 1, 2
LOGPROBS = [[-1.0], [-1.0, -2.0], [-3.0, -0.1, -0.1, -0.1]]
ALONE = [[-1.5], [-6.0, -8.0], [-3.0, -0.5, -0.5, -0.5]]


@pytest.mark.parametrize(
    ("method", "scores"),
    [
        ("token_length_normalized", [-1.0, -1.5, -0.825]),
        ("greedy_token_selection", [2.0, 1.0, 0.0]),
        ("unconditional_likelihood_normalized", [0.5, 5.5, 0.3]),
        ("exact", [-1.0, -3.0, -3.3]),
    ],
)
def test_each_method_scores_by_its_own_rule(method: str, scores: list[float]) -> None:
    assert decide(method, LOGPROBS, ALONE) == pytest.approx(scores)


def test_greedy_lets_a_finished_option_compete_with_its_mean() -> None:
    assert decide("greedy_token_selection", [[-1.0, -3.0], [-1.0, -1.0, -9.0], [-1.0, -1.0, -2.0]]) == [1.0, 2.0, 3.0]


class Recorder:
    """A scorer that answers every scored token with minus its id, and keeps the requests."""

    def __init__(self, tokenizer: Tokenizer, error: Exception | None = None) -> None:
        self.tokenizer = tokenizer
        self.processor = TextProcessor(tokenizer)
        self.error = error
        self.requests: list[Request] = []

    def submit_many(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        self.requests.extend(requests)
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        if self.error is not None:
            future.set_exception(self.error)
            return future
        ids = request.score_ids or []
        logprobs = [TokenLogprob(i, "", -float(i)) for i in ids]
        future.set_result(Completion("", ids, "stop", Usage(len(request.prompt), 0), logprobs))
        return future


def test_each_token_of_the_trie_is_scored_once() -> None:
    recorder = Recorder(Tokenizer(byte_tokenizer()))
    trie = ChoiceTrie(PromptInput(np.array([9], np.int32)), [(1, 2, 3), (1, 2), (1, 4), (5,)])
    requests = trie.requests()
    assert [(r.prompt.ids.tolist(), r.score_ids) for r in requests] == [
        ([9], [1, 2]),
        ([9, 1, 2], [3]),
        ([9, 1], [4]),
        ([9], [5]),
    ]
    answers = [future.result() for future in recorder.submit_many(requests)]
    assert trie.logprobs(answers) == [[-1.0, -2.0, -3.0], [-1.0, -2.0], [-1.0, -4.0], [-5.0]]


def test_with_nothing_before_them_first_tokens_count_as_zero() -> None:
    recorder = Recorder(Tokenizer(byte_tokenizer()))
    trie = ChoiceTrie(PromptInput(np.zeros(0, dtype=np.int32)), [(1, 2), (3,), (1, 4)])
    answers = [future.result() for future in recorder.submit_many(trie.requests())]
    assert [r.prompt.ids.tolist() for r in recorder.requests] == [[1], [1]]
    assert trie.logprobs(answers) == [[0.0, -2.0], [0.0], [0.0, -4.0]]


def test_choices_are_cut_as_in_one_text_with_the_end_of_the_prompt() -> None:
    tokenizer = Tokenizer(byte_tokenizer(merges=MERGES))
    prompt = PromptInput(np.array(tokenizer.encode("Grade: "), np.int32))
    options = tokenize_choices(tokenizer, prompt, ["A", "B"])
    assert options.base.ids.tolist() == tokenizer.encode("Grade:")
    assert [tokenizer.decode(ids) for ids in options.continuations] == [" A", " B"]
    assert options.num_prompt == (0, 1)  # the space before B is a token of the prompt's own


def test_choices_that_fit_the_prompt_follow_it_as_it_is() -> None:
    tokenizer = Tokenizer(byte_tokenizer(merges=MERGES))
    prompt = PromptInput(np.array(tokenizer.encode("Grade:"), np.int32))
    options = tokenize_choices(tokenizer, prompt, [" A", " B"])
    assert options.base.ids.tolist() == prompt.ids.tolist() and options.num_prompt == (0, 0)
    assert [len(ids) for ids in options.continuations] == [1, 2]


def test_a_special_token_is_never_cut_anew() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    options = tokenize_choices(tokenizer, PromptInput(np.array([BOS], np.int32)), ["A"])
    assert options.base.ids.tolist() == [BOS] and options.continuations == ((65,),)


@pytest.mark.parametrize(
    ("choices", "method", "reason"),
    [
        ([], "exact", "choices is empty"),
        (["a", "a"], "exact", "duplicates"),
        (["a", ""], "exact", "empty text"),
        ("ab", "exact", "a list of texts"),
        (["a", 1], "exact", "a list of texts"),
        (["a"], "best", "known: token_length_normalized"),
    ],
)
def test_bad_choices_are_refused(choices: Any, method: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_choices(choices, method)


def test_the_first_error_is_the_selections_error() -> None:
    recorder = Recorder(Tokenizer(byte_tokenizer()), EngineError("no"))
    with pytest.raises(EngineError, match="no"):
        submit_select(recorder, PromptInput(np.array([65], np.int32)), ["a", "b"], "exact").result()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    tokenizer = byte_tokenizer(merges=MERGES)
    with Runtime(tiny_model(), tokenizer=tokenizer, dtype="float32") as runtime:
        yield runtime


def reference(runtime: Runtime, prompt: list[int], continuation: list[int]) -> float:
    with torch.inference_mode():
        logits = runtime.model(torch.tensor([prompt + continuation])).logits[0].log_softmax(-1)
    return sum(logits[len(prompt) + i - 1, token].item() for i, token in enumerate(continuation))


def test_logprobs_are_those_of_the_models_own_forward(runtime: Runtime) -> None:
    choices = ["organ", "organism", "or", "else"]
    selection = runtime.select("An ", choices, method="exact")
    encode = runtime.tokenizer.encode
    expected = [reference(runtime, encode("An "), encode(choice)) for choice in choices]
    assert selection.logprobs == pytest.approx(expected, abs=1e-4)
    assert selection.choice == choices[expected.index(max(expected))]
    assert sum(selection.probabilities) == pytest.approx(1)
    assert selection.probabilities[0] / selection.probabilities[3] == pytest.approx(
        math.exp(expected[0] - expected[3]), rel=1e-3
    )


def test_healed_choices_are_compared_over_the_same_characters(runtime: Runtime) -> None:
    encode = runtime.tokenizer.encode
    selection = runtime.select("Grade: ", ["A", "B"], method="exact")
    assert selection.logprobs == pytest.approx(
        [reference(runtime, encode("Grade:"), encode(text)) for text in (" A", " B")], abs=1e-4
    )
    assert runtime.tokenizer.decode(selection.token_ids) == f"Grade: {selection.choice}"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_choice_cached_and_not(runtime: Runtime, method: str) -> None:
    choices = ["yes", "no", "maybe so"]
    first = runtime.select("Is it? ", choices, method=method)
    runtime.clear_cache()
    again = runtime.select("Is it? ", choices, method=method)
    assert again.choice == first.choice
    assert again.scores == pytest.approx(first.scores, abs=1e-4)
