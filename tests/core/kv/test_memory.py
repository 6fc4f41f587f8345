"""What fits on a device: sizes from the configuration or from free memory, and what is said when it is too little.

A GPU's free memory is given here; tests/gpu/test_memory.py asks a real one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftlm.core.config import CacheConfig, EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.kv import memory
from graftlm.core.loaded_model import LoadedModel
from graftlm.core.model import weights
from graftlm.core.model.load import load_model
from graftlm.core.runtime import Runtime
from tests.models import byte_tokenizer, tiny_model

TOKEN = 2 * 2 * (16 + 16) * 4  # bytes: layers, KV heads, K and V, float32
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(tiny_model(), EngineConfig(device="cpu"), byte_tokenizer())


@pytest.fixture
def on_gpu(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, device=GPU)


def give(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: num_bytes)


@pytest.mark.parametrize(
    ("cache", "num_slots"),
    [
        (CacheConfig(max_tokens=300), 300),
        (CacheConfig(max_bytes=100 * TOKEN + 1), 100),
        (CacheConfig(max_tokens=50, max_bytes=100 * TOKEN), 50),
        (CacheConfig(memory_share=0.5), 500),
        (CacheConfig(memory_share=0.5, max_tokens=700), 500),
        (CacheConfig(memory_share=1.0, max_tokens=700), 700),
        (CacheConfig(max_tokens=300, page_size=16), 288),
    ],
)
def test_the_least_of_what_is_configured_sizes_the_pool(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, cache: CacheConfig, num_slots: int
) -> None:
    give(monkeypatch, 1000 * TOKEN)
    assert memory.pool_size(loaded, cache) == num_slots


@pytest.mark.parametrize(
    ("device", "capability", "free", "tokens"),
    [
        (torch.device("cpu"), None, 256 * 10**9, 2048),
        (GPU, (9, 0), 16 * 10**9, 8192),
        (GPU, (10, 0), 4 * 10**9, 8192),
        (GPU, (9, 0), 3 * 10**9, 2048),
        (GPU, (8, 0), 16 * 10**9, 2048),
    ],
)
def test_steps_are_large_on_a_fast_gpu_with_room(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    capability: tuple[int, int] | None,
    free: int,
    tokens: int,
) -> None:
    give(monkeypatch, free)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_device = replace(loaded, device=device)
    assert memory.step_tokens(None, on_device) == tokens
    assert memory.step_tokens(100, on_device) == 100


def test_without_a_wish_a_gpu_gives_most_of_what_is_free_and_a_cpu_a_quarter(
    loaded: LoadedModel, on_gpu: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 10_000 * TOKEN)
    assert memory.pool_size(on_gpu, CacheConfig()) == 8_500
    assert memory.pool_size(loaded, CacheConfig()) == 2_500


def test_a_cpu_pool_is_no_larger_than_its_contexts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 10**9 * TOKEN)
    assert memory.pool_size(loaded, CacheConfig()) == 64 * loaded.max_model_len


def test_a_gpu_without_room_for_two_tokens_is_an_error_with_its_remedies(
    on_gpu: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, TOKEN)
    with pytest.raises(
        ConfigError, match=r"would hold 0 tokens; one token takes 512 bytes.*memory_share.*smaller model"
    ):
        memory.pool_size(on_gpu, CacheConfig())


def test_a_pool_larger_than_the_gpus_free_memory_is_refused_before_it_is_allocated(
    on_gpu: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 1000 * TOKEN)
    message = r"pool of 2,000 tokens takes 1\.0 MB, 0\.5 MB are free beside the weights; .* to 850 tokens"
    with pytest.raises(ConfigError, match=message):
        memory.pool_size(on_gpu, CacheConfig(max_tokens=2000))
    assert memory.pool_size(on_gpu, CacheConfig(max_tokens=1000)) == 1000


def test_a_pool_larger_than_a_computers_free_memory_is_refused_before_it_is_allocated(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 1000 * TOKEN)
    with pytest.raises(ConfigError, match=r"takes 1\.0 MB, 0\.5 MB are free beside the weights; .* to 250 tokens"):
        memory.pool_size(loaded, CacheConfig(max_bytes=2000 * TOKEN))


def test_a_pool_of_less_than_a_page_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="would hold 0 tokens"):
        memory.pool_size(loaded, CacheConfig(max_tokens=20, page_size=64))


def test_weights_larger_than_the_gpus_free_memory_are_refused_before_they_are_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    give(monkeypatch, 1000)
    with pytest.raises(ModelError, match=r"weights of tiny take 0\.\d MB, 0\.0 MB are free on cuda:0; use dtype="):
        memory.check_weights_fit("tiny", model, GPU)
    memory.check_weights_fit("tiny", model, torch.device("cpu"))  # they are there already


def test_experts_that_do_not_fit_are_named_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model("qwen3_moe").config.save_pretrained(tmp_path)  # there are no weights beside it
    give(monkeypatch, 1000)
    experts = 2 * 4 * 3 * 64 * 32 * 4 / 1e6  # layers, experts, projections, hidden and inner size, bytes
    with pytest.raises(ModelError, match=rf"take 0\.\d MB \({experts:.1f} MB of them experts\), 0\.0 MB are free"):
        weights.read_weights(str(tmp_path), EngineConfig(), GPU)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("auto", 4), ("bfloat16", 2)])
def test_weights_larger_than_a_machines_memory_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, num_bytes: int
) -> None:
    model = tiny_model(vocab_size=1200)
    model.half().config.save_pretrained(tmp_path)  # half precision becomes float32 on a CPU
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    give(monkeypatch, 1)
    needed = sum(p.numel() for p in model.parameters()) * num_bytes / 1e6
    with pytest.raises(
        ModelError, match=rf"take {needed:.1f} MB, 0\.0 MB are free in this machine's memory; use dtype="
    ):
        weights.read_weights(str(tmp_path), EngineConfig(dtype=dtype), torch.device("cpu"))


def test_a_containers_limit_is_less_than_the_machines_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "file 5\ninactive_file 100\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    assert memory.free_bytes(torch.device("cpu")) == 400
    (tmp_path / "memory.max").write_text("max")
    assert memory.free_bytes(torch.device("cpu")) > 1000


def test_tied_weights_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tie_word_embeddings=True)
    give(monkeypatch, sum(t.nbytes for t in [*model.parameters(), *model.buffers()]))
    memory.check_weights_fit("tied", model, GPU)


def test_a_runtime_whose_pool_holds_nothing_fails_its_requests_with_the_reason() -> None:
    runtime = Runtime(tiny_model(), tokenizer=byte_tokenizer(), cache=CacheConfig(max_bytes=600))
    with runtime, pytest.raises(ConfigError, match="would hold 1 tokens"):
        runtime.generate("x")


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_of_memory_lies_between_none_and_all(share: float) -> None:
    with pytest.raises(ConfigError, match=r"memory_share is .*; it must lie in \(0, 1\]"):
        CacheConfig(memory_share=share)
