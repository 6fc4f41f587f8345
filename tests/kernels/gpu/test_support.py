"""Which devices the Triton kernels can run on, and what a runtime takes where they cannot."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from graftlm.core import engine_builder
from graftlm.core.config import EngineConfig
from graftlm.core.model.lane import default_attention
from graftlm.core.model.load import load_model
from graftlm.kernels.cpu.attention.backend import TorchAttention
from graftlm.kernels.gpu.support import triton_problem
from graftlm.kernels.kv_store import allocate_kv
from tests.models import byte_tokenizer, tiny_model

GPU = torch.device("cuda", 0)


@pytest.fixture
def old_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")


def test_there_is_no_triton_on_a_cpu() -> None:
    assert triton_problem(torch.device("cpu")) == "Triton needs a GPU, this is cpu"


def test_an_old_card_is_named_with_what_the_kernels_need(old_card: None) -> None:
    assert triton_problem(GPU) == "the kernels need compute capability 8.0, an old card has 7.5"


def test_a_missing_triton_and_one_that_is_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert triton_problem(GPU) is None
    monkeypatch.setattr("triton.__version__", "3.3.1")
    assert triton_problem(GPU) == "the kernels need Triton 3.4, 3.3.1 is installed"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_problem(GPU) == "Triton is not installed"


def test_an_old_card_runs_the_torch_definition_with_one_warning(old_card: None) -> None:
    loaded = replace(load_model(tiny_model(), EngineConfig(device="cpu"), byte_tokenizer()), device=GPU)
    store = allocate_kv(loaded.kv_layout, 8, loaded.dtype)
    assert default_attention(GPU) is TorchAttention
    with pytest.warns(UserWarning, match="attention 'torch' is used, more slowly: triton: the kernels need") as seen:
        chosen = engine_builder._attention(loaded, EngineConfig(), {"torch": TorchAttention}, store)
    assert isinstance(chosen, TorchAttention) and len(seen) == 1
