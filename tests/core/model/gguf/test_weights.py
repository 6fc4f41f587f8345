"""Models of GGUF files compute what the models that the files were written from compute."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.model.description import resolve
from graftlm.core.model.gguf.reader import read_gguf
from graftlm.core.model.load import load_model
from graftlm.core.model.quantised import held
from graftlm.core.model.weights import read_weights
from graftlm.core.runtime import Runtime
from graftlm.kernels.codes.expert_codes import codes_of
from graftlm.kernels.quantised_modules import QuantisedLinear
from graftlm.kernels.quantised_weight import QuantisedWeight
from tests.gguf_files import metadata_of, tensors_of, tiny_gguf, write_gguf
from tests.models import greedy_reference, random_prompt, tiny_model

CPU = EngineConfig(device="cpu")
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama of another head size": ("llama", {"head_dim": 32}, {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, {}),
    "llama with biases": ("llama", {"attention_bias": True}, {}),
    "mixtral": ("mixtral", {"sliding_window": None}, EXPERTS),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen2moe": ("qwen2_moe", {}, EXPERTS | {"expert_shared_feed_forward_length": 32}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}, EXPERTS),
    "gemma": ("gemma", {"tie_word_embeddings": True}, {}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
        {"attention__sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
        {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2},
    ),
    "phi3": ("phi3", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "granite": (
        "granite",
        {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 3.0},
        {"embedding_scale": 2.0, "residual_scale": 0.5, "attention__scale": 0.25, "logit_scale": 3.0},
    ),
    "smollm3": ("smollm3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}, {}),
    "gpt-oss": (
        "gpt_oss",
        {"intermediate_size": 32},
        EXPERTS
        | {
            "attention__sliding_window": 8,
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 32.0,
            "rope__scaling__original_context_length": 4096,
        },
    ),
}


def architecture(name: str) -> str:
    return "llama" if name == "mixtral" else name.split(",")[0].split()[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_file_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    kind, overrides, extra = FAMILIES[name]
    model = tiny_model(kind, **overrides)
    path = tiny_gguf(tmp_path / "tiny.gguf", model, architecture(name), **extra)
    read = read_weights(resolve(path), CPU, torch.device("cpu"))
    assert type(read) is type(model)
    expected = model.state_dict()
    for key, tensor in read.state_dict().items():
        tolerance = 2e-7 if architecture(name).startswith("gemma") and "norm" in key else 0.0  # (w + 1) - 1
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=tolerance, msg=key)
    ids = torch.tensor([random_prompt(24)])
    with torch.inference_mode():
        found, wanted = read(ids).logits, model(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)


def test_a_file_answers_as_transformers_does_and_is_known_to_later_loads(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = tiny_gguf(tmp_path / "tiny.gguf", model)
    prompt = random_prompt(20)
    expected = greedy_reference(model, prompt, 24)
    for _ in range(2):  # the second is built without transformers
        with Runtime(path, device="cpu") as runtime:
            found = runtime.generate([prompt], max_tokens=24, temperature=0.0, ignore_eos=True)
        assert list(found[0].token_ids) == expected
    assert type(load_model(path, CPU).model).__name__ == "PlainDecoder"


def quantised_tensors(model: Any, kind: str = "llama") -> dict[str, Any]:
    """Tensors of a model whose matrices are Q8_0."""
    tensors = tensors_of(model, kind)
    for name, (value, _) in tensors.items():
        if value.ndim >= 2 and name.endswith(".weight"):
            blocks = value.reshape(*value.shape[:-1], -1, 32)
            d = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
            codes = np.round(blocks / d.astype(np.float32)).clip(-127, 127).astype(np.int8)
            raw = np.concatenate([d.view(np.uint8), codes.view(np.uint8)], -1)
            tensors[name] = raw.reshape(*value.shape[:-1], -1), "Q8_0"
    return tensors


def test_a_quantised_file_runs_in_bfloat16_with_the_values_of_its_codes(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = quantised_tensors(model)
    path = write_gguf(tmp_path / "tiny.gguf", metadata_of(model, "llama"), tensors)
    loaded = read_weights(resolve(path), CPU, torch.device("cpu"))
    raw = tensors["blk.1.ffn_down.weight"][0].reshape(64, -1, 34)
    values = raw[..., 2:].view(np.int8) * raw[..., :2].copy().view(np.float16).astype(np.float32)
    held: Any = loaded.get_submodule("model.layers.1.mlp.down_proj")
    assert type(held) is QuantisedLinear and type(held.quantised) is QuantisedWeight
    down = held.weight
    assert down.dtype is torch.bfloat16
    assert torch.equal(down, torch.from_numpy(values.reshape(64, -1)).bfloat16())
    exact = read_weights(resolve(path), EngineConfig(device="cpu", dtype="float32"), torch.device("cpu"))
    q = exact.get_parameter("model.layers.0.self_attn.q_proj.weight")
    torch.testing.assert_close(q, model.get_parameter("model.layers.0.self_attn.q_proj.weight"), rtol=0, atol=3e-3)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_experts_stay_codes_where_kernels_multiply_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, overrides, extra = FAMILIES[name]
    model = tiny_model(kind, **overrides)
    own = {f"{name}.{key.replace('__', '.')}": value for key, value in extra.items()}
    path = write_gguf(tmp_path / "tiny.gguf", metadata_of(model, name) | own, quantised_tensors(model, name))
    config = EngineConfig(device="cpu", dtype="bfloat16")
    dense = read_weights(resolve(path), config, torch.device("cpu"))
    monkeypatch.setattr(held.HeldWeights, "keeps_experts", True)
    monkeypatch.setattr(held, "coded_problem", lambda *_: None)
    read = read_weights(resolve(path), config, torch.device("cpu"))
    experts = [module for module in read.modules() if codes_of(module)]
    assert len(experts) == 2
    for module, plain in zip(experts, (m for m in dense.modules() if hasattr(m, "down_proj")), strict=True):
        for leaf, codes in codes_of(module).items():
            assert torch.equal(codes.parameter(), plain.get_parameter(leaf)), leaf
    ids = torch.tensor([random_prompt(24)])
    with torch.inference_mode():
        assert torch.equal(read(ids).logits, dense(ids).logits)


def test_a_split_model_is_read_from_all_of_its_files(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = list(tensors_of(model, "llama").items())
    meta = metadata_of(model, "llama") | {"split.count": 2, "split.tensors.count": len(tensors)}
    first = write_gguf(tmp_path / "m-00001-of-00002.gguf", meta, dict(tensors[:5]))
    second = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(ModelError, match="1 are missing, 'm-00002-of-00002.gguf' first"):
        resolve(first)
    write_gguf(second, {"split.no": 1}, dict(tensors[5:]))
    for source in (first, second, tmp_path):
        read = read_weights(resolve(source), CPU, torch.device("cpu"))
        assert torch.equal(read.get_parameter("lm_head.weight"), model.get_parameter("lm_head.weight"))


def test_tensors_that_are_missing_unknown_or_of_another_shape_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    meta, tensors = metadata_of(model, "llama"), tensors_of(model, "llama")
    down = tensors.pop("blk.1.ffn_down.weight")

    def load(changed: dict[str, Any]) -> None:
        read_weights(resolve(write_gguf(tmp_path / "m.gguf", meta, changed)), CPU, torch.device("cpu"))

    with pytest.raises(ModelError, match=r"lacks 1 tensors of a 'llama' model, 'model.layers.1.mlp.down_proj.weight'"):
        load(tensors)
    with pytest.raises(ModelError, match=r"'blk.1.ffn_down.weight' in .* is \[64, 32\], expected \[64, 96\]"):
        load(tensors | {"blk.1.ffn_down.weight": (down[0][:, :32], "F32")})
    with pytest.raises(ModelError, match=r"'blk.0.ssm_a.weight' \[64\], for which 'llama' has no place"):
        load(tensors | {"blk.1.ffn_down.weight": down, "blk.0.ssm_a.weight": (np.ones(64, np.float32), "F32")})
    tensors["blk.1.ffn_down.weight"] = down
    for name in ("blk.x.attn_q.weight", "blk.0.attn_q.scale", "blk.1.attn_q.bias", "output.bias", "blk.0", ""):
        with pytest.raises(ModelError, match=rf"has a tensor '{name}' \[2\], for which 'llama' has no place"):
            load(tensors | {name: (np.ones(2, np.float32), "F32")})
    with pytest.raises(ModelError, match="has no tensor 'token_embd.weight', which every model has"):
        load({name: tensor for name, tensor in tensors.items() if name != "token_embd.weight"})
    with pytest.raises(ModelError, match=r"'token_embd.weight' \[100, 64\] with a row for 100"):
        load(tensors | {"token_embd.weight": (np.ones((100, 64), np.float32), "F32")})
    for factors in (np.ones(3, np.float32), np.zeros(8, np.float32)):
        with pytest.raises(ModelError, match=r"factors of the rotary embedding in .* expected 8 numbers above 0"):
            load(tensors | {"rope_freqs.weight": (factors, "F32")})
    with pytest.raises(ModelError, match=r"has no tensors: it holds a vocabulary"):
        load({})


def test_numbers_that_no_model_has_are_named_with_their_tensor(tmp_path: Path) -> None:
    """They were an error of the first request, which advised a wider dtype."""
    model = tiny_model("llama")
    meta, tensors = metadata_of(model, "llama"), tensors_of(model, "llama")
    path, up = tmp_path / "m.gguf", tensors["blk.1.ffn_up.weight"][0].copy()
    up[3, 3] = np.nan
    with pytest.raises(ModelError, match=r"has values in 'model.layers.1.mlp.up_proj.weight' that are infinite"):
        load_model(write_gguf(path, meta, tensors | {"blk.1.ffn_up.weight": (up, "F32")}), CPU)
    for value in (0, np.inf):
        norm = {"blk.1.attn_norm.weight": (np.full(64, value, np.float32), "F32")}
        with pytest.raises(ModelError, match=r"'blk.1.attn_norm.weight' in .* has values that are infinite or no"):
            load_model(write_gguf(path, meta, tensors | norm), CPU)
    coded = quantised_tensors(model)
    raw = coded["blk.0.attn_q.weight"][0]
    raw[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(ModelError, match=r"'blk.0.attn_q.weight' in .* \(Q8_0\) has a scale that is infinite or no"):
        load_model(write_gguf(path, meta, coded), CPU)


def test_experts_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    kind, overrides, extra = FAMILIES["qwen3moe"]
    model = tiny_model(kind, **overrides)
    own = {f"qwen3moe.{key.replace('__', '.')}": value for key, value in extra.items()}
    meta, tensors = metadata_of(model, "qwen3moe") | own, tensors_of(model, "qwen3moe")
    name = "blk.1.ffn_up_exps.weight"

    def load(changed: dict[str, Any]) -> None:
        read_weights(resolve(write_gguf(tmp_path / "m.gguf", meta, changed)), CPU, torch.device("cpu"))

    with pytest.raises(ModelError, match=rf"has no tensor '{name}', but 'blk.1.ffn_gate_exps.weight'"):
        load({key: tensor for key, tensor in tensors.items() if key != name})
    with pytest.raises(ModelError, match=rf"'{name}' in .* is \[2, 32, 64\], expected \[4, 32, 64\]"):
        load(tensors | {name: (tensors[name][0][:2], "F32")})


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    with pytest.raises(ConfigError, match="quantised already"):
        load_model(path, EngineConfig(device="cpu", quantization="fp8"))


def test_llama_3_scales_its_rotations_by_factors_in_the_file(tmp_path: Path) -> None:
    scaled = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = tiny_model("llama", rope_parameters=scaled)
    own: Any = model
    plain = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    factors = (plain.model.rotary_emb.inv_freq / own.model.rotary_emb.inv_freq).numpy()  # type: ignore[union-attr]
    for name, given in (("llama3", factors), ("other", np.linspace(1, 5, len(factors), dtype=np.float32))):
        tensors = tensors_of(model, "llama") | {"rope_freqs.weight": (given, "F32")}
        path = write_gguf(tmp_path / f"{name}.gguf", metadata_of(model, "llama"), tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read: Any = read_weights(resolve(path), CPU, torch.device("cpu"))
        expected = plain.model.rotary_emb.inv_freq / torch.from_numpy(given)  # type: ignore[union-attr]
        torch.testing.assert_close(read.model.rotary_emb.inv_freq, expected)
        assert read.model.rotary_emb.attention_scaling == 1.0
    assert read_gguf(path).floats("rope_freqs.weight") is not None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__attn_factor": 0.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4)),
            },
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32,
                "rope__scaling__yarn_attn_factor": 1.25,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.25,
            },
        ),
    ],
)
def test_rotations_are_scaled_as_the_metadata_says(
    written: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Also by keys of old files and of new ones, which were read as no scaling."""
    model = tiny_model("llama", rope_parameters={"rope_theta": 10_000.0, **expected})
    read: Any = read_weights(resolve(tiny_gguf(tmp_path / "tiny.gguf", model, **written)), CPU, torch.device("cpu"))
    own: Any = model
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, own.model.rotary_emb.inv_freq)
    assert read.model.rotary_emb.attention_scaling == pytest.approx(own.model.rotary_emb.attention_scaling)
