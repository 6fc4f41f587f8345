from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import graftlm as gl
from graftlm.core.config import EngineConfig
from graftlm.core.model import known_models
from graftlm.core.model.embedded import sprout_folder
from graftlm.core.model.known_models import KnownModel, find
from graftlm.core.model.load import load_model
from graftlm.core.model.plain_decoder import PlainDecoder
from tests.models import byte_tokenizer, greedy_reference, tiny_model

CPU = EngineConfig(device="cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRAFTLM_CACHE_DIR", str(folder))
    return folder


def saved(folder: Path, kind: str, *, max_shard_size: str = "1GB", dtype: Any = None, **overrides: Any) -> Any:
    model = tiny_model(kind, **overrides)
    model = model.to(dtype) if dtype is not None else model
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
        ("llama", {"tie_word_embeddings": True, "mlp_bias": True, "head_dim": 32}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
        ("llama", {"max_shard_size": "60KB"}),
    ],
)
def test_a_second_load_is_built_without_transformers_and_answers_as_the_first(
    kind: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(tmp_path, kind, **overrides)
    expected = greedy_reference(model, list(range(40, 60)), 12)
    executions = set()
    for built in (False, True):
        loaded = load_model(tmp_path, CPU)
        assert isinstance(loaded.model, PlainDecoder) is built
        executions.add(loaded.execution)
        with gl.Runtime(str(tmp_path), device="cpu") as runtime:
            answer = runtime.generate(list(range(40, 60)), max_tokens=12, temperature=0, ignore_eos=True)
        assert list(answer.token_ids) == expected
    assert len(executions) == 1 and executions.pop().startswith("paged")


def test_layers_context_and_ends_are_those_of_the_first_load(tmp_path: Path) -> None:
    saved(tmp_path, "mistral", sliding_window=8)
    first, second = load_model(tmp_path, CPU), load_model(tmp_path, CPU)
    assert isinstance(second.model, PlainDecoder)
    assert second.layers == first.layers and first.layers[0].window == 8
    for name in ("dtype", "max_model_len", "vocab_size", "eos_token_ids", "name", "lane_reason"):
        assert getattr(second, name) == getattr(first, name)


def test_other_precisions_have_records_of_their_own(tmp_path: Path) -> None:
    saved(tmp_path, "llama", dtype=torch.bfloat16)
    for config in (CPU, EngineConfig(device="cpu", dtype="float32"), EngineConfig(device="cpu", strict=True)):
        first, second = load_model(tmp_path, config), load_model(tmp_path, config)
        assert not isinstance(first.model, PlainDecoder) and isinstance(second.model, PlainDecoder)
        assert second.dtype == first.dtype


def test_weights_that_changed_are_read_by_transformers_again(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    load_model(tmp_path, CPU)
    assert find(str(tmp_path), CPU) is not None
    saved(tmp_path, "llama", seed=1)
    assert find(str(tmp_path), CPU) is None


def test_a_damaged_record_counts_as_missing(tmp_path: Path, cache: Path) -> None:
    saved(tmp_path, "llama")
    load_model(tmp_path, CPU)
    (record,) = (cache / "known-models").iterdir()
    record.write_bytes(record.read_bytes()[:-1] + b"x")
    assert find(str(tmp_path), CPU) is None


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("gpt2", {}),
        ("gemma", {}),
        ("olmo2", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_models_that_compute_something_else_are_left_to_transformers(
    kind: str, overrides: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    saved(tmp_path, kind, **overrides)
    load_model(tmp_path, CPU)
    assert not any((cache / "known-models").glob("*")) and find(str(tmp_path), CPU) is None


def test_a_model_that_differs_by_a_hundred_thousandth_is_not_recorded(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = known_models.KnownModel._described

    def with_other_epsilon(loaded: Any) -> KnownModel:
        known = described(loaded)
        known.config["rms_norm_eps"] *= 100
        return known

    monkeypatch.setattr(known_models.KnownModel, "_described", with_other_epsilon)
    saved(tmp_path, "llama")
    load_model(tmp_path, CPU)
    assert not any((cache / "known-models").glob("*"))


def test_the_packages_record_of_the_embedded_model_is_what_a_first_load_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = known_models.EMBEDDED.read_text(encoding="utf-8")
    kept: list[KnownModel] = []
    monkeypatch.setattr(known_models, "sprout_folder", lambda: Path("elsewhere"))
    monkeypatch.setattr(KnownModel, "keep", lambda known, *_: kept.append(known))
    load_model(sprout_folder(), CPU)
    assert json.loads(packaged) == json.loads(json.dumps(asdict(kept[0])))


def test_a_process_that_generates_imports_no_transformers() -> None:
    code = """
import sys
import graftlm as gl
with gl.Runtime("sprout", device="cpu", quiet=True) as runtime:
    assert runtime.generate("Mara is a baker. Mara works as a", max_tokens=3, temperature=0).text
    assert runtime.generate("x", max_tokens=4, regex="[a-z]+").text
    assert runtime.max_model_len == 4096
print(sorted(name for name in sys.modules if name.split(".")[0] in ("transformers", "accelerate", "sympy")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("[]\n", "")
