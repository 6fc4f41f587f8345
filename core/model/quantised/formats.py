"""The tensors of a quantised linear layer in a checkpoint, as one QuantisedWeight, without rounding.

A format is recognised by the tensors that are there, since checkpoints leave out layers and mix formats; the
quantization_config decides only what tensors do not show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graftlm.core.errors import ModelError
from graftlm.kernels.quantised_weight import VALUES, QuantisedWeight, Table

Tensors = Mapping[str, torch.Tensor]
"""The tensors of a layer by the ends of their names: "weight_packed", "qweight", ..."""

Config = Mapping[str, Any]

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Field of a word for each of eight outputs; the fields hold outputs 0 2 4 6 1 3 5 7."""


class Unread(Exception):
    """The reason why the tensors of a layer cannot be read."""


def read_layer(tensors: Tensors, config: Config, shape: tuple[int, ...] | None, dtype: torch.dtype) -> QuantisedWeight:
    """Return the weight of a layer.

    config  the checkpoint's quantization_config with its quant_method
    shape   of the weight, if the model's module is known
    Raises Unread for tensors of a format that is not supported.
    """
    _check_config(config)
    if "qweight" in tensors:
        return _awq(tensors, config, dtype) if config["quant_method"] == "awq" else _gptq(tensors, config, shape, dtype)
    if "weight_packed" in tensors:
        is_words = tensors["weight_packed"].dtype is torch.int32
        return _packed_words(tensors, config, dtype) if is_words else _four_bit_floats(tensors, dtype)
    if "weight.absmax" in tensors:
        return _nf4(tensors, dtype)
    if "_weight_qdata" in tensors:
        return _of_bytes(tensors["_weight_qdata"], tensors["_weight_scale"], tensors.get("_weight_zero_point"), dtype)
    weight = tensors["weight"]
    if "SCB" in tensors:
        return _of_bytes(weight, tensors["SCB"].float()[:, None] / 127, None, dtype)
    if weight.dtype is torch.uint8 and "weight_scale_2" in tensors:
        return _four_bit_floats(tensors, dtype)
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    if scale is None:
        raise Unread(f"there is a {weight.dtype} weight without a scale, beside {sorted(tensors)}")
    return _of_bytes(weight, scale, tensors.get("weight_zero_point"), dtype, _block(config))


def _check_config(config: Config) -> None:
    """Raise Unread for what a quantization_config does with weights beside their codes."""
    transform = config.get("transform_config")
    if isinstance(transform, Mapping) and transform.get("config_groups"):
        raise Unread("its inputs or outputs are transformed when the model runs (transform_config)")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise Unread(f"it is sparse ({sparsity['format']!r})")
    algorithm = str(config.get("quant_algo") or "")
    if config["quant_method"] == "modelopt" and any(part in algorithm for part in ("AWQ", "SQ", "SVD")):
        raise Unread(f"its inputs are scaled when the model runs (quant_algo {algorithm!r})")


def _weights_of(config: Config) -> list[Mapping[str, Any]]:
    """Return how compressed-tensors' groups of layers are quantised."""
    groups = config.get("config_groups") or {}
    given = groups.values() if isinstance(groups, Mapping) else groups
    found = [group.get("weights") for group in given if isinstance(group, Mapping)]
    return [weights for weights in found if isinstance(weights, Mapping)]


def _block(config: Config) -> tuple[int, int]:
    """Return outputs and inputs of a block of a scale."""
    found = config.get("weight_block_size")
    for weights in _weights_of(config):
        found = found or weights.get("block_structure")
    if isinstance(found, str):  # "128x128"
        found = found.split("x")
    if not found:
        return 128, 128
    height, width = (int(part) for part in found)
    if min(height, width) < 1:
        raise Unread(f"its blocks are {list(found)}, expected two sizes from 1 on")
    return height, width


def _check_groups(config: Config, bits: int, k: int, num_groups: int) -> None:
    """Raise Unread if bits or inputs of a group are not those of the quantization_config, where it has one for all."""
    if config["quant_method"] == "compressed-tensors":
        given = [(found.get("num_bits"), found.get("group_size")) for found in _weights_of(config)]
    elif any(config.get(key) for key in ("dynamic", "extra_config", "layer_config")):
        return
    else:
        given = [(config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size")))]
    own = bits, k // num_groups
    sizes = [(b, {None: own[1], -1: k}.get(g, g)) for b, g in given if b is not None]
    if sizes and not any(b == own[0] and (g == own[1] or num_groups == 1) for b, g in sizes):
        said = " or ".join(f"{b} bits in groups of {g}" for b, g in dict.fromkeys(sizes))
        raise Unread(f"its tensors are of {own[0]} bits in groups of {own[1]} of {k} inputs, config.json says {said}")


# -- 8 bits --------------------------------------------------------------------------------------------------------


def _of_bytes(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    dtype: torch.dtype,
    block: tuple[int, int] = (128, 128),
) -> QuantisedWeight:
    """Return a weight [n, k] of int8 or e4m3, with a scale per tensor, output, group of inputs or block."""
    if weight.dtype not in (torch.int8, torch.float8_e4m3fn) or weight.dim() != 2:
        raise Unread(f"its weight is {weight.dtype} {list(weight.shape)}; int8 and float8_e4m3fn matrices are read")
    n, k = weight.shape
    codes = weight.view(torch.uint8)
    table: Table | None = "e4m3"
    zeros: torch.Tensor | int | None = None
    if weight.dtype is torch.int8:
        codes, table = torch.from_numpy(codes.numpy() ^ 128), None
        zeros = 128 if zero is None or not zero.any() else zero.to(torch.int16).reshape(n, -1) + 128
    if scale.dtype is torch.uint8:  # MXFP8: powers of two
        scale = torch.exp2(scale.float() - 127)
    scale = scale.reshape(1, 1).expand(n, 1) if scale.numel() == 1 else scale if scale.dim() == 2 else scale[:, None]
    if scale.shape[0] == n:
        return _weight(codes, 8, table, 1, scale, zeros, dtype)
    height, width = block
    if tuple(scale.shape) != (-(-n // height), -(-k // width)):
        raise Unread(f"scales {list(scale.shape)} of a weight {[n, k]} are no blocks of {height} x {width}")
    if k % width:  # the last blocks are short
        part = int(np.gcd(k, width))
        scale = _floats(scale).repeat_interleave(width // part, 1)[:, : k // part]
    return _weight(codes, 8, table, height, scale, zeros, dtype)


def _weight(
    codes: torch.Tensor,
    bits: Any,
    table: Any,
    block_n: int,
    scale: torch.Tensor,
    zero: torch.Tensor | int | None,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> QuantisedWeight:
    k = codes.shape[1] * 8 // bits
    if not scale.is_floating_point():
        raise Unread(f"its scales are {scale.dtype}")
    if not torch.isfinite(scale.float()).all():
        raise Unread("a scale is infinite or no number")
    if table != "nf4" and scale.numel() and not scale.float().any():  # other writers give rows of zeros a scale above 0
        raise Unread("all of its scales are 0: its file is incomplete or damaged")
    if k % scale.shape[1]:
        raise Unread(f"{k} inputs have {scale.shape[1]} scales")
    return QuantisedWeight(
        codes.contiguous(),
        bits,
        table,
        k // scale.shape[1],
        block_n,
        scale.contiguous(),
        zero,
        order=order,
        dtype=dtype,
    )


def _floats(scale: torch.Tensor) -> torch.Tensor:
    """Return scales of 8 bits, such as powers of two, in float32."""
    return scale.float() if scale.element_size() == 1 else scale


# -- 4-bit floats --------------------------------------------------------------------------------------------------


def _four_bit_floats(tensors: Tensors, dtype: torch.dtype) -> QuantisedWeight:
    """Return NVFP4 of compressed-tensors or ModelOpt, or MXFP4: two codes a byte, the low nibble first.

    A global scale divides the block scales in compressed-tensors (weight_global_scale) and multiplies them in ModelOpt
    (weight_scale_2). MXFP4 has powers of two.
    """
    codes = tensors.get("weight_packed", tensors.get("weight"))
    scale = tensors["weight_scale"]
    if codes is None or codes.dtype is not torch.uint8:
        raise Unread("its 4-bit floats are not packed in bytes")
    group = 32 if scale.dtype is torch.uint8 else 16
    if scale.shape[-1] * group != 2 * codes.shape[-1]:
        raise Unread(f"{2 * codes.shape[-1]} inputs have {scale.shape[-1]} scales, expected one for each {group}")
    if scale.dtype is torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    elif "weight_global_scale" in tensors:
        scale = scale.float() / tensors["weight_global_scale"].float()
    elif "weight_scale_2" in tensors:
        scale = scale.float() * tensors["weight_scale_2"].float()
    else:
        raise Unread("its 4-bit floats have no global scale")
    return _weight(codes, 4, "e2m1", 1, scale, None, dtype)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> QuantisedWeight:
    """Return GPT-OSS's experts as one weight [num_experts * n, k].

    blocks  uint8 [num_experts, n, k / 32, 16]
    scales  uint8 [num_experts, n, k / 32]: exponents of two plus 127
    """
    groups = scales.shape[-1]
    scale = torch.exp2(scales.reshape(-1, groups).float() - 127)
    return _weight(blocks.reshape(len(scale), -1), 4, "e2m1", 1, scale, None, dtype)


def _nf4(tensors: Tensors, dtype: torch.dtype) -> QuantisedWeight:
    """Return bitsandbytes' 4 bits: blocks of the flattened weight, the high nibble first, scales in 8 bits or not."""
    state = next((tensor for name, tensor in tensors.items() if name.startswith("weight.quant_state")), None)
    if state is None:
        raise Unread("it has no quant_state")
    found = json.loads(state.numpy().tobytes())
    (n, k), block = found["shape"], int(found["blocksize"])
    if found["quant_type"] != "nf4" or k % block:
        raise Unread(f"it is {found['quant_type']} in blocks of {block} of {k} inputs; nf4 in whole blocks is read")
    scale, table = tensors["weight.absmax"], tensors.get("weight.quant_map")
    if table is not None and not torch.allclose(
        table.float(), torch.tensor(VALUES["nf4"], dtype=torch.float32), atol=1e-4
    ):
        raise Unread("the values of its codes (quant_map) are not those of nf4")
    if scale.numel() != n * k // block:
        raise Unread(f"it has {scale.numel()} scales, expected {n * k // block} for {[n, k]} in blocks of {block}")
    if "weight.nested_absmax" in tensors:
        outer = tensors["weight.nested_absmax"].float().repeat_interleave(int(found["nested_blocksize"]))
        inner = tensors["weight.nested_quant_map"].float()[scale.long().flatten()]
        scale = inner * outer[: len(inner)] + float(found["nested_offset"])
    raw = tensors["weight"].numpy().reshape(n, k // 2)
    codes = torch.from_numpy(raw >> 4 | raw << 4)
    return _weight(codes, 4, "nf4", 1, scale.reshape(n, -1), None, dtype)


# -- integers in words ---------------------------------------------------------------------------------------------


def _fields(words: torch.Tensor, bits: int, axis: int) -> npt.NDArray[np.uint8]:
    """Return the fields of int32 words along an axis, lowest first."""
    if bits not in (4, 8):
        raise Unread(f"it has {bits} bits; 4 and 8 are read")
    if words.dtype is not torch.int32:
        raise Unread(f"its codes or zero points are {words.dtype}, expected int32")
    raw = np.ascontiguousarray(words.numpy() if axis == 1 else words.numpy().T).view("<u4").view(np.uint8)
    if bits == 4:
        wide = raw.astype("<u2")
        raw = ((wide | wide << 4) & 0x0F0F).astype("<u2").view(np.uint8)
    return raw if axis == 1 else raw.T


def _packed_words(tensors: Tensors, config: Config, dtype: torch.dtype) -> QuantisedWeight:
    """Return compressed-tensors' integers: fields of code + 2^(bits - 1) along inputs, zero points along outputs."""
    n, k = (int(x) for x in tensors["weight_shape"])
    words, scale, zero = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    bits = next((b for b in (4, 8) if words.shape[1] == -(-k * b // 32)), 0)
    codes = _fields(words, bits, 1)[:, :k]
    middle = 1 << bits - 1
    zeros: torch.Tensor | int = middle
    groups = tensors.get("weight_g_idx")
    given = _weights_of(config)
    if zero is None and given and all(found.get("symmetric") is False for found in given):
        raise Unread("it has no 'weight_zero_point', and config.json says that its codes are not symmetric")
    if groups is None and given and all(found.get("actorder") in (True, "group", "dynamic") for found in given):
        raise Unread("it has no 'weight_g_idx', and config.json says that its inputs are ordered (actorder)")
    _check_groups(config, bits, k, scale.shape[1])
    if zero is not None:
        packed = zero.dtype is torch.int32
        zeros = torch.from_numpy(_fields(zero, bits, 0)[:n].copy()) if packed else zero.to(torch.int16) + middle
        zeros = zeros.reshape(n, -1)
    return _ordered(codes, bits, scale, zeros, groups, dtype)


def _gptq(tensors: Tensors, config: Config, shape: tuple[int, ...] | None, dtype: torch.dtype) -> QuantisedWeight:
    """Return GPTQ's integers: fields along inputs; zero points along outputs, stored less one in version 1.

    Some writers of version 1 store true zero points of symmetric weights: their values tell.
    """
    words, order = tensors["qweight"], tensors.get("g_idx")
    k = order.numel() if order is not None else shape[1] if shape is not None else words.shape[0] * 8
    bits = 32 * words.shape[0] // k
    version = config.get("checkpoint_format")
    if version not in (None, "", "gptq", "gptq_v2"):
        raise Unread(f"it is GPTQ of format {version!r}; 'gptq' and 'gptq_v2' are read")
    if order is None and config.get("desc_act"):
        raise Unread("it has no 'g_idx', and config.json says that its inputs are ordered (desc_act)")
    _check_groups(config, bits, k, len(tensors["scales"]))
    codes = np.ascontiguousarray(_fields(words, bits, 0).T)
    zero = _fields(tensors["qzeros"], bits, 1).astype(np.int16).T
    less = version != "gptq_v2"
    if config.get("sym") and (zero == zero.flat[0]).all():
        less = bool(zero.flat[0] == (1 << bits - 1) - 1)
    zeros = torch.from_numpy(np.ascontiguousarray(zero + 1 if less else zero))
    return _ordered(codes, bits, tensors["scales"].t(), zeros, order, dtype)


def _awq(tensors: Tensors, config: Config, dtype: torch.dtype) -> QuantisedWeight:
    """Return AWQ's integers of version "gemm": fields along outputs, interleaved; zero points likewise."""
    version, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise Unread(f"it is AWQ of version {version!r} in {bits} bits; 'gemm' in 4 bits is read")

    def straight(words: torch.Tensor) -> npt.NDArray[np.uint8]:
        fields = _fields(words, 4, 1)
        fields = fields.reshape(len(fields), -1, 8)[:, :, _AWQ_PLACES].reshape(len(fields), -1)
        return np.ascontiguousarray(fields.T)

    if "qzeros" not in tensors and config.get("zero_point", True):
        raise Unread("it has no 'qzeros', and config.json says that it has zero points")
    zeros = torch.from_numpy(straight(tensors["qzeros"])) if "qzeros" in tensors else 8
    _check_groups(config, 4, len(tensors["qweight"]), len(tensors["scales"]))
    return _ordered(straight(tensors["qweight"]), 4, tensors["scales"].t(), zeros, None, dtype)


def _ordered(
    codes: npt.NDArray[np.uint8],
    bits: int,
    scale: torch.Tensor,
    zeros: torch.Tensor | int,
    groups: torch.Tensor | None,
    dtype: torch.dtype,
) -> QuantisedWeight:
    """Return the weight of codes [n, k] whose inputs belong to `groups` [k], sorted by group if they are not."""
    k, num_groups = codes.shape[1], scale.shape[1]
    order = None
    if groups is not None and not (groups == -1).all():  # which stands for none
        each = groups.numpy()
        if len(each) != k or each.min() < 0 or each.max() >= num_groups:
            raise Unread(
                f"the groups of its inputs are {len(each)} numbers from {each.min()} to {each.max()}, expected {k} "
                f"from 0 to {num_groups - 1}"
            )
        if not np.array_equal(each, np.arange(k) // (k // num_groups)):
            if not (np.bincount(each, minlength=num_groups) == k // num_groups).all():
                raise Unread("its groups of inputs differ in size")
            order = np.argsort(each, kind="stable")
            codes = codes[:, order]
    codes = np.ascontiguousarray(codes)
    if bits == 4:
        pairs = codes.view("<u2")
        codes = (pairs | pairs >> 4).astype(np.uint8)
    places = torch.from_numpy(order.astype(np.int32)) if order is not None else None
    return _weight(torch.from_numpy(codes), bits, None, 1, scale, zeros, dtype, places)


def unreadable(source: str, layer: str, reason: object) -> ModelError:
    """Return the error of a layer that cannot be read."""
    return ModelError(
        f"the quantised weight of {layer!r} in {source!r} cannot be read: {reason}; use another file of the model, of "
        "a format that docs/quantised.md lists"
    )
