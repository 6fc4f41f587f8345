"""Mixtures of experts run as grouped products, in CUDA graphs; experts that no kernel takes, with gathered weights."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

from graftlm.core.execution import cuda_graphs
from graftlm.core.fusion import mixtures
from graftlm.core.fusion.mixtures import FusedExperts
from tests.gpu.device import GREEDY, NEW, family, on_gpu
from tests.models import greedy_reference, tiny_model

pytestmark = pytest.mark.gpu

KINDS = ["gpt_oss", "qwen3_moe", "mixtral"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_of_a_mixture_are_captured(kind: str, dtype: torch.dtype) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with on_gpu(kind, dtype) as runtime:
            answers = runtime.generate(family(5), **GREEDY)
            assert runtime._thread.engine.runner.graphs
    assert [str(w.message) for w in said if "CUDA graphs" in str(w.message)] == []
    assert [len(answer.token_ids) for answer in answers] == [NEW] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_a_mixture_equal_transformers(kind: str) -> None:
    prompts = family(6)
    with on_gpu(kind) as runtime:
        found = [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)]
    assert found == [greedy_reference(tiny_model(kind), prompt, NEW) for prompt in prompts]


def test_mixtures_of_different_routers_load_one_after_the_other() -> None:
    prompts = family(3)
    for kind in (*KINDS, *reversed(KINDS)):
        with on_gpu(kind) as runtime:
            found = [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)]
        assert found == [greedy_reference(tiny_model(kind), prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_run_as_grouped_products(kind: str) -> None:
    with on_gpu(kind, torch.bfloat16) as runtime:
        loaded = runtime.load()._thread.engine.runner.eager.loaded
        forwards = [vars(module).get("forward") for module in loaded.model.modules()]
        assert sum(isinstance(forward, FusedExperts) for forward in forwards) == 2
        assert loaded.fusions.reasons == {}


def test_experts_that_no_kernel_takes_and_too_large_to_gather_run_without_graphs_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixtures, "expert_weights", lambda module: "not known")
    monkeypatch.setattr(cuda_graphs, "MAX_GATHERED", 0)
    prompts = family(3)
    with (
        pytest.warns(UserWarning, match="decode steps run without CUDA graphs") as caught,
        on_gpu("gpt_oss") as runtime,
    ):
        found = [answer.token_ids for answer in runtime.generate(prompts, **GREEDY)]
    assert found == [greedy_reference(tiny_model("gpt_oss"), prompt, NEW) for prompt in prompts]
    assert sum("CUDA graphs" in str(warning.message) for warning in caught) == 1
    assert torch.randn(3, device="cuda").isfinite().all()  # torch's generator does not think that it is captured
    with on_gpu() as runtime:
        assert runtime.load()._thread.engine.runner.graphs


def test_graphs_that_become_garbage_do_not_disturb_a_capture() -> None:
    with on_gpu() as runtime:
        cycle: list[Any] = [dict(runtime.load()._thread.engine.runner.graphs)]
    cycle.append(cycle)
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        del runtime, cycle
        with on_gpu() as runtime:
            assert runtime.load()._thread.engine.runner.graphs
    finally:
        gc.set_threshold(*before)
