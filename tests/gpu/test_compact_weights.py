"""Models whose weights are read in 12 bits answer as they do with all 16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlm.core.config import CacheConfig
from graftlm.core.errors import ConfigError
from graftlm.core.fusion.gpu_layers import FusedLayer
from graftlm.core.runtime import Runtime
from tests.gpu.device import difference_of_graphs, error_of_decode
from tests.models import byte_tokenizer, random_prompt, tiny_model

pytestmark = pytest.mark.gpu

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def wide(kind: str = "llama") -> Any:
    """As much in every sum as in the narrow models."""
    model = tiny_model(kind, **WIDE)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data *= (64 / WIDE["hidden_size"]) ** 0.5
    return model


def on_hopper(kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Runtime:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    options = {"cache": CacheConfig(max_tokens=4096), "max_batch": 40, "device": "cuda"} | options
    return Runtime(wide(kind).to(dtype), tokenizer=byte_tokenizer(), **options)


def num_compact(runtime: Runtime) -> int:
    runner: Any = runtime.load()._thread.engine.runner  # type: ignore[union-attr]
    return int(runner.eager.loaded.fusions.num_compact)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("num_rows", [1, 5, 20, 40])
def test_logits_are_near_those_of_float32(kind: str, num_rows: int) -> None:
    with on_hopper(kind) as runtime:
        assert num_compact(runtime) == 2 * 4 + 1  # products of two layers, and the head
        assert error_of_decode(runtime, wide(kind).bfloat16().float(), num_rows) < 2e-2


def test_a_replayed_graph_computes_what_the_eager_step_does() -> None:
    with on_hopper() as runtime:
        assert difference_of_graphs(runtime, 8) == 0.0


def test_the_model_is_given_back_as_it_was() -> None:
    model = wide().bfloat16()
    ids = torch.tensor([random_prompt(20)], device="cuda")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with Runtime(
        model, tokenizer=byte_tokenizer(), device="cuda", cache=CacheConfig(max_tokens=512), max_batch=4
    ) as own:
        assert num_compact(own) > 0
        own.generate("once", max_tokens=4)
    assert not any(isinstance(vars(module).get("forward"), FusedLayer) for module in model.modules())
    assert all(torch.equal(weight.cpu(), weights[name]) for name, weight in model.state_dict().items())
    assert torch.isfinite(model(ids).logits).all()


def test_who_does_not_want_them_has_none() -> None:
    with on_hopper(compact_weights=False) as runtime:
        assert num_compact(runtime) == 0
    with on_hopper(dtype=torch.float16) as runtime:
        assert num_compact(runtime) == 0


def test_asking_for_what_there_is_not_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"compact_weights is True, but there are none for .*in float16"):
        on_hopper(compact_weights=True, dtype=torch.float16).load()


def test_strict_mode_answers_the_same_with_them_and_without() -> None:
    prompts = [random_prompt(20 + 3 * i) for i in range(5)]
    found = []
    for compact in (True, False):
        with on_hopper(strict=True, compact_weights=compact) as runtime:
            assert (num_compact(runtime) > 0) is compact
            found.append(
                [a.token_ids for a in runtime.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)]
            )
    assert found[0] == found[1]


def test_they_are_left_out_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, expected in ((25_000_000, 2 * 4 + 1), (10_000_000, 0)):  # they take 7.1 MB
        monkeypatch.setattr("graftlm.core.fusion.compact_weights.free_bytes", lambda device, free=free: free)
        with on_hopper() as runtime:
            assert num_compact(runtime) == expected
    monkeypatch.setattr("graftlm.core.fusion.compact_weights.free_bytes", lambda device: 1_000_000)
    with pytest.raises(ConfigError, match=r"compact weights take 7\.\d MB beside the weights, 1\.0 MB are free"):
        on_hopper(compact_weights=True).load()
