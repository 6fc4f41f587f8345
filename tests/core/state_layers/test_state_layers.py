"""Hybrid models in the paged lane: tokens equal those of transformers in every way to ask."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from graftlm import CacheConfig, Runtime
from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError
from graftlm.core.model.load import load_model
from graftlm.core.state_layers.gated_delta_net import GatedDeltaNet
from graftlm.core.state_layers.state_layer import UnknownVariant
from graftlm.core.state_layers.state_layers import StateLayers
from graftlm.kernels.recurrent.state_step import RaggedRows, StateStep
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model

KINDS = [
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "kimi_linear",
]
ALIKE = ["lfm3", "olmo_hybrid", "bailing_hybrid"]
"""Kinds whose layers with a state are those of another kind but for their projections and gates."""
NUM_TOKENS = 8
SHARED = random_prompt(90, seed=1)
PROMPTS = [SHARED + random_prompt(length, seed=length) for length in (3, 20, 31)] + [random_prompt(9, seed=9)]
GREEDY = {"max_tokens": NUM_TOKENS, "temperature": 0, "stop_token_ids": []}


def runtime_of(model: PreTrainedModel, **options: object) -> Runtime:
    return Runtime(model, tokenizer=byte_tokenizer(), device="cpu", dtype="float32", **options)


def tokens_of(runtime: Runtime, prompts: list[list[int]]) -> list[list[int]]:
    return [completion.token_ids for completion in runtime.generate(prompts, **GREEDY)]


def begin_alike(found: list[list[int]], expected: list[list[int]]) -> bool:
    """Whether each list is the start of its expected one: an end token may cut it short."""
    return all(one and one == whole[: len(one)] for one, whole in zip(found, expected, strict=True))


@cache
def case(kind: str) -> tuple[PreTrainedModel, list[list[int]]]:
    model = tiny_model(kind)
    return model, [greedy_reference(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(kind: str) -> PreTrainedModel:
    return case(kind)[0]


@pytest.fixture
def expected(kind: str) -> list[list[int]]:
    return case(kind)[1]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the serial lane would warn
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.mark.parametrize("kind", [*KINDS, *ALIKE])
def test_tokens_alone_in_a_batch_and_cached_are_those_of_generate(
    model: PreTrainedModel, expected: list[list[int]]
) -> None:
    with runtime_of(model) as runtime:
        assert begin_alike(tokens_of(runtime, PROMPTS[:1]), expected[:1])
        assert begin_alike(tokens_of(runtime, PROMPTS), expected)
        computed = runtime.stats().computed_tokens
        assert begin_alike(tokens_of(runtime, PROMPTS), expected)
        assert runtime.stats().computed_tokens - computed < sum(map(len, PROMPTS)) // 3
        assert runtime.stats().execution.startswith("paged")


def test_tokens_with_chunked_prefill_and_overlap_are_those_of_generate(
    model: PreTrainedModel, expected: list[list[int]]
) -> None:
    with runtime_of(model, max_step_tokens=16, overlap=True) as runtime:
        assert begin_alike(tokens_of(runtime, PROMPTS), expected)


def test_tokens_with_states_and_slots_for_two_sequences_are_those_of_generate(
    model: PreTrainedModel, expected: list[list[int]]
) -> None:
    cache = CacheConfig(states=2, max_tokens=2 * len(PROMPTS[2]))
    with runtime_of(model, cache=cache, max_step_tokens=40) as runtime:
        for _ in range(2):
            assert begin_alike(tokens_of(runtime, PROMPTS), expected)


def test_tokens_of_forks_are_those_of_generate(model: PreTrainedModel, expected: list[list[int]]) -> None:
    with runtime_of(model) as runtime:
        several = runtime.generate(PROMPTS[1], n=3, **GREEDY)
        assert begin_alike([one.token_ids for one in several.completions], [expected[1]] * 3)
        assert runtime.stats().computed_tokens == len(PROMPTS[1])
        longer = PROMPTS[1] + several.token_ids
        assert begin_alike(tokens_of(runtime, [longer]), [greedy_reference(model, longer, NUM_TOKENS)])
        assert runtime.stats().computed_tokens - len(PROMPTS[1]) <= 1  # the last token of the answer never ran


def test_requests_that_share_a_prefix_compute_it_once() -> None:
    with runtime_of(tiny_model("qwen3_next")) as runtime:
        tokens_of(runtime, PROMPTS[:3])
        assert runtime.stats().computed_tokens == len(SHARED) + 3 + 20 + 31
        assert runtime.stats().states_cached > 0


def test_a_prompt_that_parts_from_a_cached_one_leaves_a_state_for_the_next() -> None:
    with runtime_of(tiny_model("qwen3_next")) as runtime:
        cached = []
        for prompt in PROMPTS[:3]:
            completion = runtime.generate(prompt, **GREEDY)
            cached.append(completion.usage.cached_tokens)
        assert cached == [0, 0, len(SHARED)]


def test_explain_counts_the_tokens_that_no_state_was_kept_among() -> None:
    with runtime_of(tiny_model("lfm2")) as runtime:
        runtime.generate(PROMPTS[0], **GREEDY)
        report = runtime.explain(runtime.generate(PROMPTS[1], **GREEDY))
        assert report.hints == ["90 more tokens were known, but no state of the model was kept among them"]


def test_a_pinned_state_survives_requests_that_need_its_slot() -> None:
    with runtime_of(tiny_model("bamba"), cache=CacheConfig(states=2)) as runtime:
        pin = runtime.warm(SHARED)
        tokens_of(runtime, [random_prompt(20, seed=seed) for seed in range(5)])
        assert runtime.generate(PROMPTS[0], **GREEDY).usage.cached_tokens == len(SHARED)
        pin.unpin()


def test_select_and_score_are_those_of_one_forward() -> None:
    model = tiny_model("lfm2")
    with runtime_of(model) as runtime:
        score = runtime.score(SHARED, [7, 8, 9])
        with torch.inference_mode():
            logits = model(torch.tensor([[*SHARED, 7, 8, 9]])).logits[0, len(SHARED) - 1 : -1].log_softmax(-1)
        wanted = [float(logits[place, token]) for place, token in enumerate((7, 8, 9))]
        assert score.logprobs == pytest.approx(wanted, abs=1e-4)
        assert runtime.select("Is it? ", ["yes", "no"]).choice in ("yes", "no")


def test_states_that_do_not_fit_are_an_error_with_the_number_that_do() -> None:
    with pytest.raises(ConfigError, match=r"states take .* sequences fit; set CacheConfig.states"):
        runtime_of(tiny_model("qwen3_next"), cache=CacheConfig(states=10**9)).load()


def test_closing_the_runtime_gives_the_modules_their_own_forward_back() -> None:
    model = tiny_model("qwen3_next")
    with runtime_of(model) as runtime:
        tokens_of(runtime, PROMPTS[:1])
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


def test_a_variant_that_is_not_computed_here_is_named() -> None:
    model = tiny_model("qwen3_next")
    module = next(m for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet")
    module.activation = "gelu"
    with pytest.raises(UnknownVariant, match="'gelu'"):
        GatedDeltaNet(module)
    assert StateLayers.of(tiny_model("llama")) is None


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operations return while it is on; `most` is the largest sum alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        return out

    def _freed(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self.now -= num_bytes


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm2"])
def test_the_memory_of_a_prefill_of_states_is_reserved(kind: str) -> None:
    layers = StateLayers.of(tiny_model(kind))
    assert layers is not None
    (layer,) = layers.layers.values()
    lengths = np.array([500, 17, 1], np.int64)
    x = torch.randn(int(lengths.sum()), layer.module.config.hidden_size if hasattr(layer.module, "config") else 64)
    rows = RaggedRows(lengths, np.array([2, 3, 4]), torch.device("cpu"))
    pool = layers.pool(8, torch.device("cpu"))
    with torch.inference_mode(), Peak() as peak:
        layer.forward(x, pool.layers[0], StateStep(0, torch.empty(0, dtype=torch.int64), rows))
    layers.undo()
    assert 0.1 * layers.work_bytes(len(x)) < peak.most < layers.work_bytes(len(x))


def test_a_kind_of_state_without_kernels_is_named_in_the_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_model(tiny_model("jamba"), EngineConfig(device="cpu"), byte_tokenizer())
    assert loaded.lane_reason == "it has layers of Mamba 1, whose states no kernel here batches"
