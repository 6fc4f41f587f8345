"""Quantised folders of each format give the values of their codes, bit for bit, and answer without the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.model.load import load_model
from graftlm.core.model.quantised import held
from graftlm.core.model.weights import read_weights
from graftlm.core.runtime import Runtime
from graftlm.kernels.codes.expert_codes import codes_of
from graftlm.kernels.quantised_weight import VALUES
from graftlm.testing.random_vision import random_picture, random_vision_model, save_vision_model
from tests.models import byte_tokenizer, greedy_reference, random_prompt, tiny_model
from tests.vision import question, reference, written

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
"""The tensors of a layer, and the float32 values of its weight."""

GROUP = 32
CPU = torch.device("cpu")


def scheme(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def words(fields: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Fields as int32 words along an axis, lowest bits first."""
    count = 32 // bits
    parts = fields.long().unflatten(axis, (-1, count))
    word = sum((parts.select(axis + 1, i) << bits * i for i in range(count)), torch.zeros(1, dtype=torch.long))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).int().contiguous()


def wide(groups: torch.Tensor, k: int) -> torch.Tensor:
    return groups.float().repeat_interleave(k // groups.shape[1], 1)


def integers(
    weight: torch.Tensor, bits: int = 4, group: int = GROUP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, float16 scales and zero points of groups that begin anywhere."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
    scale = ((high - low) / ((1 << bits) - 1)).half()
    zero = (-low / scale.float()).round().clamp(1, (1 << bits) - 1)
    codes = (weight / wide(scale, weight.shape[1]) + wide(zero, weight.shape[1])).round().clamp(0, (1 << bits) - 1)
    return codes, scale, zero


def fp8(weight: torch.Tensor, scale: torch.Tensor, each: torch.Tensor, name: str = "weight_scale") -> Written:
    codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scale}, codes.float() * each


def fp8_channel(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return fp8(weight, scale, scale.float())


def fp8_tensor(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax() / 448).view(1)
    tensors, values = fp8(weight, scale, scale)
    return tensors | {"input_scale": torch.ones(1)}, values


def fp8_block(weight: torch.Tensor, name: str = "weight_scale_inv") -> Written:
    n, k = weight.shape  # blocks of 48 x 48: the last ones are short
    scale = torch.rand(-(-n // 48), -(-k // 48)) * 0.001 + 0.001
    return fp8(weight, scale, scale.repeat_interleave(48, 0).repeat_interleave(48, 1)[:n, :k], name)


def int8_channel(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def int8_asymmetric(weight: torch.Tensor) -> Written:
    codes, scale, zero = integers(weight, 8, weight.shape[1])
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale, "weight_zero_point": (zero - 128).char()}
    return tensors, (codes - zero) * scale.float()


def w4a16(weight: torch.Tensor) -> Written:
    codes, scale, _ = integers(weight)
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": words(codes, 4, 1), "weight_scale": scale.bfloat16(), "weight_shape": shape}
    return tensors, (codes - 8) * wide(scale.bfloat16(), weight.shape[1])


def w4a16_asymmetric(weight: torch.Tensor) -> Written:
    codes, scale, zero = integers(weight)
    tensors, _ = w4a16(weight)
    k = weight.shape[1]
    values = (codes - wide(zero, k)) * wide(scale.bfloat16(), k)
    return tensors | {"weight_zero_point": words(zero, 4, 0)}, values


def w8a16(weight: torch.Tensor) -> Written:
    codes, scale, _ = integers(weight, 8)
    tensors = {"weight_packed": words(codes, 8, 1), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return tensors, (codes - 128) * wide(scale, weight.shape[1])


def shuffled(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, zero points and the group of each input, in a random order of inputs."""
    groups = torch.randperm(weight.shape[1]) // GROUP
    order = torch.argsort(groups, stable=True)
    codes, scale, zero = integers(weight[:, order])
    back = torch.empty_like(codes)
    back[:, order] = codes
    return back, scale, zero, groups.int()


def w4a16_actorder(weight: torch.Tensor) -> Written:
    codes, scale, _, groups = shuffled(weight)
    shape = torch.tensor(weight.shape)
    tensors = {
        "weight_packed": words(codes, 4, 1),
        "weight_scale": scale,
        "weight_shape": shape,
        "weight_g_idx": groups,
    }
    return tensors, (codes - 8) * scale.float()[:, groups.long()]


def gptq(weight: torch.Tensor, less: int = 1, bits: int = 4) -> Written:
    codes, scale, zero = integers(weight, bits)
    tensors = {
        "qweight": words(codes.T, bits, 0), "qzeros": words(zero.T - less, bits, 1), "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }  # fmt: skip
    return tensors, (codes - wide(zero, weight.shape[1])) * wide(scale, weight.shape[1])


def gptq_actorder(weight: torch.Tensor) -> Written:
    codes, scale, zero, groups = shuffled(weight)
    tensors = {
        "qweight": words(codes.T, 4, 0), "qzeros": words(zero.T - 1, 4, 1), "scales": scale.T.contiguous(),
        "g_idx": groups,
    }  # fmt: skip
    return tensors, (codes - zero[:, groups.long()]) * scale.float()[:, groups.long()]


def gptq_symmetric(weight: torch.Tensor, stored: int) -> Written:
    codes, scale, zero = integers(weight)
    tensors = {
        "qweight": words(codes.T, 4, 0), "qzeros": words(torch.full_like(zero.T, stored), 4, 1),
        "scales": scale.T.contiguous(),
    }  # fmt: skip
    return tensors, (codes - 8) * wide(scale, weight.shape[1])


def awq(weight: torch.Tensor) -> Written:
    codes, scale, zero = integers(weight)

    def mixed(fields: torch.Tensor) -> torch.Tensor:
        return words(fields.T.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4, 1)

    tensors = {"qweight": mixed(codes), "qzeros": mixed(zero), "scales": scale.T.contiguous()}
    return tensors, (codes - wide(zero, weight.shape[1])) * wide(scale, weight.shape[1])


def nibbles(codes: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    first, second = codes[:, ::2].byte(), codes[:, 1::2].byte()
    return first << 4 | second if high_first else first | second << 4


def nf4(weight: torch.Tensor, *, nested: bool = True) -> Written:
    n, k = weight.shape
    codes = torch.randint(0, 16, (n, k))
    absmax = weight.unflatten(1, (-1, 32)).abs().amax(2).flatten()
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {"weight": nibbles(codes, high_first=True).view(-1, 1), "weight.quant_map": torch.tensor(VALUES["nf4"])}
    if nested:
        outer, offset = torch.rand(-(-len(absmax) // 16)), 0.25
        inner, places = torch.rand(256), torch.randint(0, 256, absmax.shape)
        absmax = inner[places] * outer.repeat_interleave(16)[: len(absmax)] + offset
        state |= {"nested_blocksize": 16, "nested_offset": offset}
        tensors |= {
            "weight.absmax": places.byte(), "weight.nested_absmax": outer, "weight.nested_quant_map": inner
        }  # fmt: skip
    else:
        tensors["weight.absmax"] = absmax
    name = "weight.quant_state.bitsandbytes__nf4"
    tensors[name] = torch.from_numpy(np.frombuffer(json.dumps(state).encode(), np.uint8).copy())
    return tensors, torch.tensor(VALUES["nf4"])[codes] * wide(absmax.view(n, -1), k)


def bnb_int8(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest / 127)[:, None]


def torchao_int8(weight: torch.Tensor) -> Written:
    tensors, values = int8_channel(weight)
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"].float()}, values


def four_bit_floats(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, weight.shape)
    return codes, torch.rand(len(weight), weight.shape[1] // group) * 100


def nvfp4(weight: torch.Tensor, *, divides: bool) -> Written:
    codes, scale = four_bit_floats(weight, 16)
    block, whole = scale.to(torch.float8_e4m3fn), torch.tensor([3.7])
    each = block.float() / whole if divides else block.float() * whole
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    tensors = {names[0]: nibbles(codes), "weight_scale": block, names[1]: whole}
    return tensors, torch.tensor(VALUES["e2m1"])[codes] * wide(each, weight.shape[1])


def mxfp8(weight: torch.Tensor) -> Written:
    exponents = torch.randint(118, 122, (len(weight), weight.shape[1] // 32)).byte()
    return fp8(weight, exponents, wide(torch.exp2(exponents.float() - 127), weight.shape[1]))


def mxfp4_linear(weight: torch.Tensor) -> Written:
    codes, _ = four_bit_floats(weight, 32)
    exponents = torch.randint(115, 125, (len(weight), weight.shape[1] // 32)).byte()
    tensors = {"weight_packed": nibbles(codes), "weight_scale": exponents}
    return tensors, torch.tensor(VALUES["e2m1"])[codes] * wide(torch.exp2(exponents.float() - 127), weight.shape[1])


BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 48], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Written], dict[str, Any]]] = {
    "compressed-tensors FP8, channel": (fp8_channel, scheme(num_bits=8, type="float", strategy="channel")),
    "compressed-tensors FP8, tensor": (fp8_tensor, scheme(num_bits=8, type="float", strategy="tensor")),
    "compressed-tensors FP8, block": (
        lambda weight: fp8_block(weight, "weight_scale"),
        scheme(num_bits=8, type="float", strategy="block", block_structure=[48, 48]),
    ),
    "compressed-tensors W8A8": (int8_channel, scheme(num_bits=8, type="int", strategy="channel")),
    "compressed-tensors int8, asymmetric": (int8_asymmetric, scheme(num_bits=8, type="int", strategy="channel")),
    "compressed-tensors W4A16": (w4a16, scheme(num_bits=4, type="int", group_size=GROUP)),
    "compressed-tensors W4A16, asymmetric": (w4a16_asymmetric, scheme(num_bits=4, type="int", group_size=GROUP)),
    "compressed-tensors W4A16, act-order": (w4a16_actorder, scheme(num_bits=4, type="int", group_size=GROUP)),
    "compressed-tensors W8A16": (w8a16, scheme(num_bits=8, type="int", group_size=GROUP)),
    "compressed-tensors NVFP4": (lambda weight: nvfp4(weight, divides=True), scheme(num_bits=4, type="float")),
    "compressed-tensors MXFP4": (mxfp4_linear, scheme(num_bits=4, type="float", group_size=32)),
    "compressed-tensors MXFP8": (mxfp8, scheme(num_bits=8, type="float", group_size=32)),
    "FP8 block": (fp8_block, BLOCKS),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "GPTQ": (gptq, GPTQ),
    "GPTQ, version 2": (lambda weight: gptq(weight, 0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "GPTQ, 8 bits": (lambda weight: gptq(weight, 1, 8), GPTQ | {"bits": 8}),
    "GPTQ, act-order": (gptq_actorder, GPTQ | {"desc_act": True}),
    "GPTQ, symmetric": (lambda weight: gptq_symmetric(weight, 7), GPTQ | {"sym": True}),
    "GPTQ, symmetric with true zero points": (lambda weight: gptq_symmetric(weight, 8), GPTQ | {"sym": True}),
    "bitsandbytes nf4": (nf4, BNB),
    "bitsandbytes nf4, plain scales": (lambda weight: nf4(weight, nested=False), BNB),
    "bitsandbytes int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "torchao int8": (torchao_int8, {"quant_method": "torchao"}),
    "ModelOpt FP8": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "ModelOpt NVFP4": (
        lambda weight: nvfp4(weight, divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
}


def write(folder: Path, name: str, **overrides: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a tiny Llama whose linear layers but the head are quantised; return it with the values of its weights."""
    torch.manual_seed(0)
    make, quantization = FORMATS[name]
    model: Any = tiny_model("llama", intermediate_size=64, **overrides)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    values: dict[str, torch.Tensor] = {}
    for layer, module in model.named_modules():
        if type(module) is nn.Linear and layer != "lm_head":
            tensors, values[f"{layer}.weight"] = make(state.pop(f"{layer}.weight"))
            state |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
            module.weight.data = values[f"{layer}.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return model, values


@pytest.mark.parametrize("name", FORMATS)
def test_weights_have_the_values_of_their_codes(name: str, tmp_path: Path) -> None:
    model, values = write(tmp_path, name)
    read = read_weights(str(tmp_path), EngineConfig(device="cpu", dtype="float32"), CPU)
    for key, value in values.items():
        assert torch.equal(read.get_parameter(key), value), key
    assert torch.equal(read.get_parameter("lm_head.weight"), model.lm_head.weight)
    rounded = read_weights(str(tmp_path), EngineConfig(device="cpu", dtype="bfloat16"), CPU)
    for key, value in values.items():  # a module with codes or a plain one
        module: Any = rounded.get_submodule(key.removesuffix(".weight"))
        assert torch.equal(module.weight, value.bfloat16()), key


def test_a_quantised_folder_answers_as_the_model_of_its_values(tmp_path: Path) -> None:
    model, _ = write(tmp_path, "AWQ")
    prompt = random_prompt(20)
    with Runtime(tmp_path, device="cpu", dtype="float32") as runtime:
        found = runtime.generate([prompt], max_tokens=16, temperature=0.0, ignore_eos=True)
    assert list(found[0].token_ids) == greedy_reference(model, prompt, 16)


def test_modelopt_s_own_file_names_the_method(tmp_path: Path) -> None:
    _, values = write(tmp_path, "ModelOpt FP8")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    read = read_weights(str(tmp_path), EngineConfig(device="cpu", dtype="float32"), CPU)
    assert all(torch.equal(read.get_parameter(key), value) for key, value in values.items())


def test_quantised_experts_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    experts = {key: value for key, value in model.state_dict().items() if ".experts." in key}
    state = {key: value.clone() for key, value in model.state_dict().items() if key not in experts}
    expected: dict[str, torch.Tensor] = {}
    for key, value in experts.items():
        stem, made = key.rpartition(".")[0], []
        for i, expert in enumerate(value):
            names = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
            parts = [fp8_channel(part.contiguous()) for part in expert.chunk(len(names))]
            for name, (tensors, _) in zip(names, parts, strict=True):
                state |= {f"{stem}.{i}.{name}.{part}": tensor for part, tensor in tensors.items()}
            made.append(torch.cat([values for _, values in parts]))
        expected[key] = torch.stack(made)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quantization_config": scheme(num_bits=8, type="float", strategy="channel")}
    (tmp_path / "config.json").write_text(json.dumps(config | quantization))
    read = read_weights(str(tmp_path), EngineConfig(device="cpu", dtype="float32"), CPU)
    assert len(expected) == 4
    for key, value in expected.items():
        assert torch.equal(read.get_parameter(key), value), key
    monkeypatch.setattr(held.HeldWeights, "keeps_experts", True)
    monkeypatch.setattr(held, "coded_problem", lambda *_: None)
    coded = read_weights(str(tmp_path), EngineConfig(device="cpu", dtype="bfloat16"), CPU)
    for key, value in expected.items():
        module, _, leaf = key.rpartition(".")
        assert torch.equal(codes_of(coded.get_submodule(module))[leaf].values(), value.bfloat16()), key


def write_mxfp4(folder: Path, **sizes: int) -> dict[str, torch.Tensor]:
    """Write a tiny GPT-OSS with experts in MXFP4; return transformers' values of these."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    model: Any = tiny_model("gpt_oss", hidden_size=64, **{"intermediate_size": 32} | sizes)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected: dict[str, torch.Tensor] = {}
    for key in [key for key in state if key.endswith(("gate_up_proj", "down_proj"))]:
        count, k, n = state.pop(key).shape
        blocks = torch.randint(0, 256, (count, n, k // 32, 16)).byte()
        scales = torch.randint(110, 120, (count, n, k // 32)).byte()
        state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        expected[key] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return expected


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    expected = write_mxfp4(tmp_path)
    read = read_weights(str(tmp_path), EngineConfig(device="cpu", dtype="bfloat16"), CPU)
    assert len(expected) == 4 and all(torch.equal(read.get_parameter(key), value) for key, value in expected.items())


def test_half_precision_becomes_bfloat16(tmp_path: Path) -> None:
    write(tmp_path, "GPTQ")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    loaded = load_model(tmp_path, EngineConfig(device="cpu"))
    assert loaded.dtype is torch.bfloat16 and loaded.lane == "paged"


def test_what_no_reader_knows_is_refused_with_the_layer(tmp_path: Path) -> None:
    write(tmp_path, "AWQ")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.down_proj' in .* AWQ of version 'gemv' in 4 bits"):
        load_model(tmp_path, EngineConfig(device="cpu"))
    with pytest.raises(ConfigError, match="quantised already"):
        load_model(tmp_path, EngineConfig(device="cpu", quantization="fp8"))


UP = "model.layers.1.mlp.up_proj"


def changed(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], **config: Any) -> None:
    """Write a folder one of whose tensors is changed, or missing (None), and its quantization_config."""
    write(folder, name.partition(":")[0])
    state = load_file(folder / "model.safetensors")
    key = f"{UP}.{name.partition(':')[2]}"
    if (new := change(state.pop(key))) is not None:
        state[key] = new.contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    found = json.loads((folder / "config.json").read_text())
    found["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(found))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor | None], dict[str, Any], str]] = {
    # these were an IndexError, a TypeError or a ZeroDivisionError
    "AWQ:scales": (torch.flatten, {}, "its tensors are of 4 bits in groups of 0 of 64 inputs"),
    "GPTQ:qweight": (lambda x: x[:0], {}, "its tensors are of 0 bits"),
    "GPTQ:g_idx": (lambda x: x + 100, {}, "64 numbers from 100 to 101, expected 64 from 0 to 1"),
    "bitsandbytes nf4:weight.nested_quant_map": (lambda x: x[:9], {}, "are no weight"),
    "compressed-tensors NVFP4:weight_packed": (torch.flatten, {}, "4096 inputs have 4 scales"),
    "FP8 block:weight": (torch.clone, {"weight_block_size": [0, 0]}, r"its blocks are \[0, 0\], expected two sizes"),
    "compressed-tensors W8A8:weight_scale": (lambda x: x[:9], {}, "are no blocks of"),
    # these were read, as other weights
    "torchao int8:_weight_scale": (torch.zeros_like, {}, "all of its scales are 0"),
    "AWQ:qweight": (torch.Tensor.float, {}, "codes or zero points are torch.float32, expected int32"),
    "AWQ:qzeros": (lambda x: None, {}, "it has no 'qzeros', and config.json says that it has zero points"),
    "GPTQ, act-order:g_idx": (lambda x: None, {}, "it has no 'g_idx', and config.json says"),
    "GPTQ, 8 bits:scales": (
        torch.clone,
        {"bits": 3},
        "of 8 bits in groups of 32 of 64 inputs, config.json says 3",
    ),
    "GPTQ, version 2:scales": (torch.clone, {"group_size": 48}, "config.json says 4 bits in groups of 48"),
    "GPTQ, symmetric:scales": (torch.clone, {"checkpoint_format": "marlin"}, "it is GPTQ of format 'marlin'"),
    "bitsandbytes nf4, plain scales:weight.absmax": (lambda x: x[:64], {}, "64 scales, expected 128 for"),
    "bitsandbytes nf4, plain scales:weight.quant_map": (torch.zeros_like, {}, "are not those of nf4"),
    "compressed-tensors MXFP4:weight_scale": (
        lambda x: x[:, :1],
        {},
        "64 inputs have 1 scales, expected one for",
    ),
    "compressed-tensors FP8, channel:weight_scale": (lambda x: x / 0, {}, "a scale is infinite or no number"),
    "compressed-tensors W4A16, act-order:weight_g_idx": (
        lambda x: None,
        scheme(num_bits=4, group_size=GROUP, actorder="group"),
        "it has no 'weight_g_idx', and config.json says",
    ),
    "compressed-tensors W4A16, asymmetric:weight_zero_point": (
        lambda x: None,
        scheme(num_bits=4, group_size=GROUP, symmetric=False),
        "it has no 'weight_zero_point', and config.json says",
    ),
    "compressed-tensors W4A16:weight_scale": (
        torch.clone,
        {"transform_config": {"config_groups": {"u": {}}}},
        r"transformed when the model runs \(transform_config\)",
    ),
    "ModelOpt NVFP4:weight_scale": (torch.clone, {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_whose_tensors_contradict_each_other_or_the_configuration_is_refused(name: str, tmp_path: Path) -> None:
    change, config, message = REFUSED[name]
    changed(tmp_path, name, change, **config)
    with pytest.raises(ModelError, match=rf"weight of 'model.layers.\d.*' in .* cannot be read: .*{message}"):
        read_weights(str(tmp_path), EngineConfig(device="cpu"), CPU)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "AWQ")
    file = tmp_path / "model.safetensors"
    for size in (0, 100, 50_000):
        file.write_bytes(file.read_bytes()[:size] if size < 50_000 else file.read_bytes() + bytes(50_000))
        with pytest.raises(ModelError, match=r"model.safetensors' is truncated or damaged \([\d,]+ bytes\): .* again"):
            read_weights(str(tmp_path), EngineConfig(device="cpu"), CPU)


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "AWQ")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": "awq"}))
    with pytest.raises(
        ModelError, match="quantization_config 'awq', expected an object|no configuration could be read"
    ):
        read_weights(str(tmp_path), EngineConfig(device="cpu"), CPU)


def test_a_vision_model_with_names_of_older_versions(tmp_path: Path) -> None:
    """Its decoder is quantised, its encoder is not; files name layers `model.layers`, models `model.language_model`."""
    folder = save_vision_model("qwen2_5_vl", tmp_path / "model")
    model, processor = random_vision_model("qwen2_5_vl")
    own = model.state_dict()
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        inner = name.replace("model.layers.", "model.language_model.layers.")
        if inner == name or tensor.dim() < 2:
            tensors[name] = tensor
            continue
        parts, values = w4a16(tensor)
        tensors |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
        own[inner].copy_(values)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    form = scheme(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    described["quantization_config"] = {**form, "format": "pack-quantized", "ignore": ["re:.*visual.*", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(described))
    prompts = [question("What is it?", random_picture(seed)) for seed in range(2)]
    expected = [reference(model, processor, prompt) for prompt in prompts]
    with Runtime(folder, dtype="float32", device="cpu") as runtime:
        done = runtime.generate(prompts, max_tokens=8, temperature=0)
        assert [(written(one.token_ids), one.usage.prompt_tokens) for one in done] == expected
