"""Round the linear layers of a plain model to codes: while it is loaded, or into a folder that other engines read too.

Embeddings, the head, routers and norms stay plain. Weights are rounded one at a time on the device that will run them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from graftlm.core.errors import ConfigError, ModelError
from graftlm.core.model.quantised.held import HeldWeights
from graftlm.core.model.quantised.rounding import GROUP, SCHEMES, Scheme, rounded, scheme_problem
from graftlm.core.model.transformers_lock import building_model, importing_transformers
from graftlm.kernels.quantised_weight import QuantisedWeight

CHECKED_TOKENS = 1024
"""Tokens of the text on which a rounded model is compared with its original."""


class Divergence(NamedTuple):
    """A rounded model beside its original: mean KL divergence in nats a token, share of tokens with the same first."""

    kl: float
    same_top: float


def scheme_of(name: str) -> Scheme:
    """Return the scheme of this name. Raises ConfigError for another name."""
    if name not in SCHEMES:
        raise ConfigError(f"quantization is {name!r}; use one of {', '.join(SCHEMES)}")
    return name  # type: ignore[return-value]


def roundable(model: nn.Module, scheme: Scheme) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that are rounded, the head excluded, with their names."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if (
            type(module) is nn.Linear
            and module is not head
            and scheme_problem(tuple(module.weight.shape), scheme) is None
        ):
            yield name, module


@torch.no_grad()
def round_model(
    model: nn.Module,
    scheme: Scheme,
    device: torch.device,
    name: str,
    largest: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Replace the weights of linear layers, and of experts where kernels multiply them, by codes on `device`.

    largest  of `rounded`, for weights of which the model has a part of the inputs
    Raises ConfigError if no kernel of the device multiplies the codes.
    """
    dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    held = HeldWeights(model, device, dtype)
    for path, module in list(roundable(model, scheme)):
        weight = rounded(module.weight.to(device), scheme, largest=largest.get(f"{path}.weight"))
        if held.keep(f"{path}.weight", weight) is not None:
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
    for path, module in list(model.named_modules()):
        _round_experts(path, module, scheme, held, device)
    if not held.weights and not held.experts:
        raise ConfigError(
            f"quantization is {scheme!r}, but no kernel on {device} multiplies its codes for {name} in "
            f"{str(dtype)[6:]}; they need bfloat16 on a CPU with llvmlite or on a Hopper GPU: use dtype='bfloat16', or "
            "leave quantization out"
        )
    held.put(model, tied=False)


def _round_experts(path: str, module: nn.Module, scheme: Scheme, held: HeldWeights, device: torch.device) -> None:
    both = [module._parameters.get(leaf) for leaf in ("gate_up_proj", "down_proj")]
    tensors = [x for x in both if x is not None and x.dim() == 3]
    if len(tensors) != 2 or device.type != "cuda":
        return
    transposed = bool(getattr(module, "is_transposed", False))
    views = [x.transpose(1, 2) if transposed else x for x in tensors]
    if any(scheme_problem((1, view.shape[2]), scheme) is not None for view in views):
        return
    up, down = (_experts(view, scheme, device) for view in views)
    held.keep_experts(path, up, down, len(views[0]), transposed=transposed)


def _experts(values: torch.Tensor, scheme: Scheme, device: torch.device) -> QuantisedWeight:
    """Return experts [num_experts, n, k] as one weight, rounded one expert at a time."""
    first, *others = [rounded(expert.to(device).contiguous(), scheme) for expert in values]
    whole = first.concat(others)
    assert isinstance(whole, QuantisedWeight)
    return whole


@torch.no_grad()
def write_rounded(source: str, out: Path, scheme: Scheme, *, check: bool, device: torch.device) -> Divergence | None:
    """Write the model of a folder or Hugging Face id with rounded weights, as a folder of compressed-tensors.

    check  compare it with its original on technical English; None is returned without
    Raises ModelError if the model is quantised, cannot be read, or has no linear layer to round; ConfigError if the
    folder exists.
    """
    from huggingface_hub import save_torch_state_dict

    with importing_transformers():
        from transformers import AutoModelForCausalLM, AutoTokenizer

    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{str(out)!r} exists and is not empty; name another folder")
    try:
        with building_model():
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
            tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise ModelError(f"{source!r} cannot be read: {type(error).__name__}: {str(error)[:300]}") from error
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{source!r} is quantised already; name its unquantised original")
    model = model.to(device).eval()
    ids = _checked_ids(tokenizer, model) if check else None
    expected = _log_probabilities(model, ids) if ids is not None else None
    state = dict(model.state_dict())
    plain = [name for name, x in model.named_modules() if isinstance(x, nn.Linear)]
    for name, module in roundable(model, scheme):
        weight = rounded(module.weight, scheme)
        del state[f"{name}.weight"]
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in tensors_of(weight).items()}
        module.weight = nn.Parameter(weight.dense(), requires_grad=False)
        plain.remove(name)
    if f"{name}.weight_scale" not in state:
        raise ModelError(f"{source!r} has no linear layer that {scheme!r} rounds")
    found = None
    if ids is not None and expected is not None:
        found = divergence(expected, _log_probabilities(model, ids))
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, os.fspath(out), safe_serialization=True)
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(config | {"quantization_config": configuration(scheme, plain)}, indent=2)
    )
    return found


def tensors_of(weight: QuantisedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of compressed-tensors for a weight that `rounded` made."""
    if weight.table == "e4m3":
        return {"weight": weight.codes.view(torch.float8_e4m3fn), "weight_scale": weight.scale}
    packed = weight.codes.contiguous().view(torch.int32)  # both have the lowest bits first, and the middle as zero
    return {"weight_packed": packed, "weight_scale": weight.scale, "weight_shape": torch.tensor(weight.shape)}


def configuration(scheme: Scheme, ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors; ignored: linear layers that stay plain."""
    if scheme == "fp8":
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
    else:
        bits = 4 if scheme == "int4" else 8
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP[scheme]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scheme == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True, "dynamic": False}}
        },
        "ignore": ignored,
    }


def _checked_ids(tokenizer: Any, model: Any) -> torch.Tensor:
    """Return the tokens of technical English, [1, n]: Python's own reference, which comes with every installation."""
    from pydoc_data import topics

    text = "\n".join(text for _, text in sorted(topics.topics.items())[:12])
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=CHECKED_TOKENS)["input_ids"]
    limit = getattr(model.config, "max_position_embeddings", None) or CHECKED_TOKENS
    found: torch.Tensor = ids[:, :limit].to(model.device)
    return found


def _log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(ids).logits[0].float().log_softmax(-1)
    return found


def divergence(expected: torch.Tensor, found: torch.Tensor) -> Divergence:
    """Compare log-probabilities [num_tokens, vocabulary] of a rounded model with those of its original."""
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    return Divergence(float(kl), float((expected.argmax(-1) == found.argmax(-1)).float().mean()))
