"""The weights of a GGUF file under the names of transformers' modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.blocks import is_quantised, quantised, raw_bytes, values_of
from graftlm.core.model.gguf.families import UNUSED, Family, family_of
from graftlm.core.model.gguf.reader import GgufFile, TensorInfo
from graftlm.core.model.quantised.held import HeldWeights
from graftlm.core.model.transformers_lock import building_model, importing_transformers
from graftlm.kernels.quantised_weight import QuantisedWeight

if TYPE_CHECKING:
    from graftlm.core.tensor_parallel.shard_plan import ShardPart

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_APART = re.compile(rf"(?:{'|'.join(UNUSED)})\.weight|blk\.\d+\.(?:{'|'.join(_EXPERTS)})\.(?:weight|bias)")
"""Tensors that are part of the configuration, and experts, which are merged."""


def read_model(
    file: GgufFile,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    widened: bool = False,
    part: ShardPart | None = None,
) -> nn.Module:
    """Return the model of a file with its weights in `dtype`, or as codes where a kernel of `device` multiplies them.

    hf_config  transformers' configuration of the file
    widened    keep no codes
    part       that is read of a model over several processes
    Raises ModelError for tensors that are missing, unknown or of another shape than the model's.
    """
    with importing_transformers():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    with building_model(), torch.device("meta"):
        described = model_class(hf_config)
    expected = {name: tuple(tensor.shape) for name, tensor in described.state_dict().items()}
    tied = {"lm_head.weight"} if hf_config.tie_word_embeddings else set()
    _check(file, expected, tied)
    held = HeldWeights(None if widened else described, device, dtype)
    state = dict(tensors(file, dtype, held, part))
    missing = sorted(set(expected) - set(state) - tied)
    if missing:
        raise ModelError(
            f"{_path(file)} lacks {len(missing)} tensors of a {file.architecture!r} model, {missing[0]!r} first; it is "
            "incomplete: download it again"
        )
    own_config = hf_config if part is None else part.hf_config
    with building_model():
        model: Any = model_class.from_pretrained(None, config=own_config, state_dict=state, dtype=dtype)
    model.config.name_or_path = str(file.paths[0])
    held.put(model, tied=bool(tied))
    loaded: nn.Module = model
    return loaded


def tensors(
    file: GgufFile, dtype: torch.dtype, held: HeldWeights, part: ShardPart | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a file by their names in transformers, in `dtype`; weights that stay codes go to `held`.

    part  that is read of a model over several processes
    """
    family = family_of(file)
    for info, name in _placed(file, family):
        if not is_quantised(info) or len(info.shape) != 2:
            values = _values(file, family, info, dtype)
            yield name, values if part is None else part.tensor(name, values)
            continue
        weight = _codes(file, family, info, dtype)
        weight = weight if part is None else part.weight(name, weight)
        place = held.keep(name, weight)
        yield name, place if place is not None else weight.dense()
    for layer in range(int(file.get("block_count"))):
        if f"blk.{layer}.{_EXPERTS[0]}.weight" in file.tensors:
            yield from _experts(file, layer, dtype, held, part)


def matrices(file: GgufFile) -> dict[str, bool]:
    """Return the names in transformers of a file's matrices; True for the embedding."""
    placed = _placed(file, family_of(file))
    return {name: info.name.startswith("token_embd") for info, name in placed if len(info.shape) == 2}


def _placed(file: GgufFile, family: Family) -> Iterator[tuple[TensorInfo, str]]:
    """Yield the tensors of a file that are one tensor of the model, with their names in transformers."""
    for tensor, info in file.tensors.items():
        if _APART.fullmatch(tensor):
            continue
        name = family.module(tensor)
        if name is None:
            raise _without_place(file, info)
        yield info, name.removesuffix(".weight") if name.endswith(".sinks.weight") else name


def _check(file: GgufFile, expected: dict[str, tuple[int, ...]], tied: set[str]) -> None:
    """Raise ModelError for a tensor of another shape than the model's."""
    for info, name in _placed(file, family_of(file)):
        shape = expected.get(name)
        if shape is None and name not in tied:
            raise _without_place(file, info)
        if shape is not None and shape != info.shape and (1, *info.shape) != shape:
            raise _misshapen(file, info, shape)
    for layer in range(int(file.get("block_count"))):
        _check_experts(file, layer, expected)


def _check_experts(file: GgufFile, layer: int, expected: dict[str, tuple[int, ...]]) -> None:
    """Raise ModelError for experts of a layer that are not all there, or of another shape than the model's."""
    infos = {leaf: file.tensors.get(f"blk.{layer}.{leaf}.weight") for leaf in _EXPERTS}
    given = [info for info in infos.values() if info is not None]
    if not given:
        return
    whole = expected.get(f"model.layers.{layer}.mlp.experts.down_proj")
    if whole is None:
        raise _without_place(file, given[0])
    missing = next((leaf for leaf, info in infos.items() if info is None), None)
    if missing is not None:
        raise ModelError(
            f"{_path(file)} has no tensor 'blk.{layer}.{missing}.weight', but {given[0].name!r}; it is incomplete: "
            "download it again"
        )
    num_experts, hidden, inner = whole if file.architecture != "gpt-oss" else (whole[0], whole[2], whole[1])
    for info in given:
        shape = (num_experts, hidden, inner) if "down" in info.name else (num_experts, inner, hidden)
        if info.shape != shape:
            raise _misshapen(file, info, shape)


def _without_place(file: GgufFile, info: TensorInfo) -> ModelError:
    return ModelError(
        f"{_path(file)} has a tensor {info.name!r} {list(info.shape)}, for which {file.architecture!r} has no place "
        "here; use the model's Hugging Face files"
    )


def _misshapen(file: GgufFile, info: TensorInfo, shape: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"{info.name!r} in {_path(file)} is {list(info.shape)}, expected {list(shape)} by the file's metadata; it is "
        "damaged or of another architecture: download it again"
    )


def _path(file: GgufFile) -> str:
    return repr(str(file.paths[0]))


def _values(file: GgufFile, family: Family, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
    leaf = info.name.split(".")[-2]
    shifted = family.plus_one and leaf.endswith("norm")
    values = values_of(info, torch.float32 if shifted else dtype)
    if info.name.endswith("norm.weight") and not (values.isfinite().all() and values.any()):
        raise ModelError(
            f"{info.name!r} in {_path(file)} has values that are infinite or no numbers, or zeros alone; the file is "
            "incomplete or damaged: download it again"
        )
    if shifted:
        return (values - 1).to(dtype)
    order = _order(file, family, info)
    values = values if order is None else values[torch.from_numpy(order)]
    return values[None] if leaf == "ffn_gate_inp_shexp" and values.dim() == 1 else values


def _codes(file: GgufFile, family: Family, info: TensorInfo, dtype: torch.dtype) -> QuantisedWeight:
    raw, order = raw_bytes(info), _order(file, family, info)
    weight = quantised(raw if order is None else raw[order], info.kind, dtype)
    _check_scales(file, info, weight)
    return weight


def _check_scales(file: GgufFile, info: TensorInfo, weight: QuantisedWeight) -> None:
    """Raise ModelError for scales that are infinite or no numbers."""
    given = weight.factors if weight.factors is not None else (weight.scale, weight.minimum)
    if not all(scales.isfinite().all() for scales in given if scales is not None):
        raise ModelError(
            f"{info.name!r} in {_path(file)} ({info.kind.name}) has a scale that is infinite or no number; the file is "
            "damaged: download it again"
        )


def _order(file: GgufFile, family: Family, info: TensorInfo) -> npt.NDArray[np.int64] | None:
    """Return the rows of a file's tensor in the order of transformers; None if it is the same."""
    leaf = info.name.split(".")[-2]
    if not family.permuted or leaf not in ("attn_q", "attn_k"):
        return None
    heads = int(file.get("attention.head_count" if leaf == "attn_q" else "attention.head_count_kv"))
    return np.arange(info.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _experts(
    file: GgufFile, layer: int, dtype: torch.dtype, held: HeldWeights, part: ShardPart | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a layer's experts: gates and ups as one tensor [num_experts, 2 i, k]; GPT-OSS: transposed, alternating."""
    prefix, to = f"blk.{layer}.", f"model.layers.{layer}.mlp.experts"
    infos = [file.tensors[f"{prefix}{name}.weight"] for name in _EXPERTS]
    alternating = file.architecture == "gpt-oss"
    places = _coded_experts(to, infos, dtype, held, part, alternating=alternating)
    dense: dict[str, torch.Tensor] = {}
    if places is not None:
        yield from places.items()
    else:
        gate, up, down = (values_of(info, dtype) for info in infos)
        if alternating:
            both = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2).contiguous()
            down = down.transpose(1, 2).contiguous()
        else:
            both = torch.cat([gate, up], 1)
        dense |= {f"{to}.gate_up_proj": both, f"{to}.down_proj": down}
    if alternating:
        gate, up, down = (values_of(file.tensors[f"{prefix}{name}.bias"], dtype) for name in _EXPERTS)
        dense |= {f"{to}.gate_up_proj_bias": torch.stack([gate, up], 2).flatten(1), f"{to}.down_proj_bias": down}
    for name, values in dense.items():
        yield name, values if part is None else part.tensor(name, values)


def _coded_experts(
    name: str,
    infos: Sequence[TensorInfo],
    dtype: torch.dtype,
    held: HeldWeights,
    part: ShardPart | None,
    *,
    alternating: bool,
) -> dict[str, torch.Tensor] | None:
    """Keep the gates, ups and downs of a layer's experts as codes; None if these must be dense."""
    gate, up, down = infos
    if not all(map(is_quantised, infos)) or gate.kind != up.kind or not held.keeps_experts:
        return None
    num_experts = gate.shape[0]
    gates, ups = (raw_bytes(info).reshape(num_experts, gate.shape[1], -1) for info in (gate, up))
    both = np.stack([gates, ups], 2) if alternating else np.concatenate([gates, ups], 1)
    both = both.reshape(num_experts, 2 * gate.shape[1], -1)
    downs = quantised(raw_bytes(down), down.kind, dtype)
    if part is not None:
        both = part.experts(f"{name}.gate_up_proj", torch.from_numpy(both)).numpy()
        downs = part.weight(f"{name}.down_proj", downs)
    gate_up = quantised(both.reshape(-1, both.shape[-1]), gate.kind, dtype)
    return held.keep_experts(name, gate_up, downs, num_experts, transposed=alternating)
