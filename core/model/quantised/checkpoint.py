"""Read quantised checkpoints of Hugging Face without the packages of their formats.

Quantised weights get their values one by one, in the dtype that the model computes in, under the names of plain ones;
transformers then builds the model from them as from any state, and merges experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graftlm.core.errors import ModelError
from graftlm.core.media.processor import reads_pictures
from graftlm.core.model.quantised.format_check import check_unexpected
from graftlm.core.model.quantised.formats import Unread, mxfp4, read_layer, unreadable
from graftlm.core.model.quantised.held import HeldWeights
from graftlm.core.model.quantised.merged_experts import MergedExperts
from graftlm.core.model.transformers_lock import building_model, importing_transformers
from graftlm.kernels.quantised_weight import QuantisedWeight

if TYPE_CHECKING:
    from graftlm.core.tensor_parallel.shard_plan import ShardPart

_PART = re.compile(
    r"(?P<layer>.+?)(?:\.weight:|\.)(?P<part>weight_packed|weight_scale_inv|weight_scale_2|weight_scale|weight_shape"
    r"|weight_zero_point|weight_g_idx|weight_global_scale|qweight|qzeros|scales|g_idx|SCB|weight_format"
    r"|_weight_qdata|_weight_scale|_weight_zero_point"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+))"
)
"""A tensor that belongs to a quantised weight beside or instead of `weight`."""

_CONTRADICTIONS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of tensors whose shapes or types are not those of their format."""

_MXFP4 = re.compile(r"(?P<name>.+)_(?P<part>blocks|scales)")
_UNUSED = re.compile(r".+\.(?:[qkv]_scale|kv_scale|input_scale|output_scale|input_global_scale|input_zero_point)")
"""Scales of activations and KV, which no weight needs: this runtime computes its own."""


def read_checkpoint(
    source: str,
    folder: Path,
    hf_config: Any,
    quantization: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    part: ShardPart | None = None,
    widened: bool = False,
) -> nn.Module:
    """Return the model of a folder of safetensors files: weights in `dtype`, or codes that `device` multiplies.

    quantization  the quantization_config with its quant_method
    widened  keep no codes
    part  that is read of a model over several processes
    Raises ModelError for tensors that are missing, or that belong to no supported format.
    """
    sees = reads_pictures(hf_config)
    with importing_transformers():
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING
        model_class: Any = mapping[type(hf_config)]
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    own_config = hf_config if part is None else part.hf_config
    if hasattr(own_config, "quantization_config"):
        del own_config.quantization_config
    with building_model(), torch.device("meta"):
        described = model_class(hf_config)
    shapes = {name: tuple(tensor.shape) for name, tensor in described.state_dict().items()}
    held = HeldWeights(None if widened else described, device, dtype)
    state = dict(_state(source, folder, quantization, shapes, held, dtype, part, _own_names(described)))
    with building_model():
        read: Any = model_class.from_pretrained(
            None, config=own_config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    model, report = read
    check_unexpected(source, report["unexpected_keys"], None)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{source!r} lacks {len(missing)} weights, {missing[0]!r} first; its files are incomplete or of another "
            "architecture than its config.json says"
        )
    model.config.name_or_path = source
    held.put(model, tied=False)
    loaded: nn.Module = model
    return loaded


def _state(
    source: str,
    folder: Path,
    quantization: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    held: HeldWeights,
    dtype: torch.dtype,
    part: ShardPart | None = None,
    own_name: Callable[[str], str] = str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of all files by the names of plain weights, or their part.

    own_name  of a parameter in the model, by that of the files
    """
    files = _TensorFiles(folder)
    layers: dict[str, dict[str, str]] = {}
    experts: dict[str, dict[str, str]] = {}
    for name in files.names:
        if quantization["quant_method"] == "mxfp4" and (found := _MXFP4.fullmatch(name)):
            experts.setdefault(found["name"], {})[found["part"]] = name
        elif found := _PART.fullmatch(name):
            layers.setdefault(found["layer"], {})[found["part"]] = name
    taken = {name for parts in (*layers.values(), *experts.values()) for name in parts.values()}
    merged = MergedExperts(shapes, held)
    for layer, parts in layers.items():
        if f"{layer}.weight" in files.names:
            parts["weight"] = f"{layer}.weight"
            taken.add(f"{layer}.weight")
        tensors: dict[str, torch.Tensor] = {}
        try:
            tensors |= {part: files.read(name) for part, name in parts.items() if part != "weight_format"}
            shape = shapes.get(own_name(f"{layer}.weight"))
            weight = read_layer(tensors, quantization, shape, dtype)
            if shape is not None and shape != weight.shape:
                raise Unread(f"its tensors give a weight {list(weight.shape)}, expected {list(shape)} by config.json")
        except Unread as error:
            raise unreadable(source, layer, error) from error
        except _CONTRADICTIONS as error:
            given = ", ".join(f"{part} {tensor.dtype} {list(tensor.shape)}" for part, tensor in tensors.items())
            expected = list(shapes.get(own_name(f"{layer}.weight"), ()))
            said = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            reason = f"{given} are no weight {expected} of {quantization['quant_method']!r} ({said})"
            raise unreadable(source, layer, reason) from error
        weight = weight if part is None else part.weight(f"{layer}.weight", weight)
        found_experts = merged.add(layer, weight)
        if found_experts is not None:
            yield from found_experts
            continue
        place = held.keep(own_name(f"{layer}.weight"), weight)
        yield f"{layer}.weight", place if place is not None else weight.dense()
    yield from merged.rest()
    yield from _experts(source, files, experts, held, dtype, part)
    for name in files.names:
        if name not in taken and not _UNUSED.fullmatch(name):
            tensor = files.read(name)
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise unreadable(source, name, f"it is {tensor.dtype} without a scale")
            yield name, tensor if part is None else part.tensor(name, tensor)


def _own_names(model: Any) -> Callable[[str], str]:
    """Return the map of names in files, perhaps of an older transformers, to those of a model's parameters."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return str
    state = model.state_dict()
    renamings: Any = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]

    def own_name(name: str) -> str:
        if name in state:
            return name
        return str(rename_source_key(name, renamings, [], model.base_model_prefix, state)[0])

    return own_name


def _experts(
    source: str,
    files: _TensorFiles,
    experts: Mapping[str, Mapping[str, str]],
    held: HeldWeights,
    dtype: torch.dtype,
    part: ShardPart | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts in MXFP4, by their blocks and scales, of which kernels multiply the codes or the values."""
    for module in {name.rpartition(".")[0]: None for name in experts}:
        weights: dict[str, QuantisedWeight] = {}
        num_experts = 0
        for leaf in ("gate_up_proj", "down_proj"):
            parts = experts.get(f"{module}.{leaf}", {})
            missing = [of for of in ("blocks", "scales") if of not in parts]
            if missing:
                raise unreadable(source, f"{module}.{leaf}", f"it has no {missing[0]!r}")
            blocks, scales = (files.read(parts[of]) for of in ("blocks", "scales"))
            if part is not None:
                blocks, scales = (part.experts(f"{module}.{leaf}", tensor) for tensor in (blocks, scales))
            try:
                weights[leaf], num_experts = mxfp4(blocks, scales, dtype), len(blocks)
            except (Unread, *_CONTRADICTIONS) as error:
                given = f"blocks {list(blocks.shape)} and scales {list(scales.shape)}"
                raise unreadable(source, f"{module}.{leaf}", f"{given} are no experts in MXFP4 ({error})") from error
        places = held.keep_experts(module, weights["gate_up_proj"], weights["down_proj"], num_experts, transposed=True)
        if places is not None:
            yield from places.items()
            continue
        for leaf, weight in weights.items():
            values = weight.dense().view(num_experts, -1, weight.shape[1])
            yield f"{module}.{leaf}", values.transpose(1, 2).contiguous()


class _TensorFiles:
    """The tensors of the safetensors files of a folder, mapped."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelError(f"{str(folder)!r} has no safetensors files, the only ones that are read quantised")
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(str(path), "pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(
                    f"{str(path)!r} is truncated or damaged ({path.stat().st_size:,} bytes): {error}; download it again"
                ) from error
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> Mapping[str, Any]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor
