"""The block types of GGUF as weights: bytes of a file to codes, scales and minima, without rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.reader import BlockType, TensorInfo
from graftlm.kernels.quantised_weight import QuantisedWeight

Array = npt.NDArray[Any]

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""The types that are numbers."""


def raw_bytes(info: TensorInfo) -> Array:
    """Return the bytes of a tensor, mapped from its file: [rows, bytes of a row]."""
    mapped = _mapped(info.path, info.path.stat().st_mtime_ns)
    flat = mapped[info.offset : info.offset + info.num_bytes]
    return flat.reshape(-1, info.shape[-1] // info.kind.size * info.kind.num_bytes)


@lru_cache(maxsize=16)
def _mapped(path: Path, _version: int) -> Array:
    return np.memmap(path, dtype=np.uint8, mode="c")  # "c": torch warns about memory that it must not write


def values_of(info: TensorInfo, dtype: torch.dtype, rows: Array | slice = slice(None)) -> torch.Tensor:
    """Return the values of a tensor in its shape; of some of its rows, [num_rows, inputs].

    Raises ModelError for a type that neither this module nor an installed gguf package reads.
    """
    raw = raw_bytes(info)
    all_rows = isinstance(rows, slice) and rows == slice(None)
    raw = raw if all_rows else raw[rows]
    if info.kind.name in PLAIN:
        values = torch.from_numpy(np.array(raw)).view(PLAIN[info.kind.name]).to(dtype)
    elif info.kind.name in _READERS:
        values = quantised(raw, info.kind, dtype).dense()
    else:
        values = _by_package(raw, info).to(dtype)
    return values.view(info.shape) if all_rows else values.view(-1, info.shape[-1])


def is_quantised(info: TensorInfo) -> bool:
    """Return True if the tensor has codes that `quantised` reads."""
    return info.kind.name in _READERS


def quantised(raw: Array, kind: BlockType, dtype: torch.dtype) -> QuantisedWeight:
    """Return the weight of rows of blocks, uint8 [n, bytes of a row]."""
    return _READERS[kind.name](raw.reshape(len(raw), -1, kind.num_bytes), dtype)


def _by_package(raw: Array, info: TensorInfo) -> torch.Tensor:
    try:
        gguf = import_module("gguf")
    except ImportError as error:
        raise ModelError(
            f"{info.name!r} in {str(info.path)!r} is stored as {info.kind.name}, which the package gguf reads: install "
            "it with `pip install 'graftlm[gguf]'`, or use a file in Q4_K_M, Q8_0 or another type of docs/quantised.md"
        ) from error
    kind = gguf.GGMLQuantizationType[info.kind.name]
    return torch.from_numpy(gguf.dequantize(np.ascontiguousarray(raw), kind))


def _half(blocks: Array, at: int) -> Array:
    """Return the float16 number at a byte of each block. [n, blocks]"""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[..., 0]


def _wide(blocks: Array, at: int) -> Array:
    """Return the float16 number at a byte of each block in float32. [n, blocks, 1]"""
    return _half(blocks, at).astype(np.float32)[..., None]


def _flat(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(len(array), -1))


def _packed(codes: Array) -> torch.Tensor:
    """Return 4-bit codes [n, ..., inputs], two a byte: [n, k / 2]."""
    pairs = np.ascontiguousarray(codes).reshape(len(codes), -1).view("<u2")
    return torch.from_numpy((pairs | pairs >> 4).astype(np.uint8))


def _fields(values: Array, shifts: range, mask: int) -> Array:
    """Return the bit fields of bytes [..., m] at some shifts: [..., num_shifts, m]."""
    return np.stack([values >> shift & mask for shift in shifts], -2)


def _halves(blocks: Array, at: int) -> Array:
    """Return 32 4-bit codes of each block: low nibbles of 16 bytes, then high ones. [n, blocks, 2, 16]"""
    return _fields(blocks[:, :, at : at + 16], range(0, 8, 4), 15)


def _q4_0(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    return QuantisedWeight(_packed(_halves(b, 2)), 4, None, 32, 1, _flat(_half(b, 0)), 8, dtype=dtype)


def _q4_1(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    scale, minimum = _flat(_half(b, 0)), _flat(_half(b, 2))
    return QuantisedWeight(_packed(_halves(b, 4)), 4, None, 32, 1, scale, minimum=minimum, dtype=dtype)


def _iq4_nl(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    return QuantisedWeight(_packed(_halves(b, 2)), 4, "iq4_nl", 32, 1, _flat(_half(b, 0)), dtype=dtype)


def _mxfp4(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    scale = np.exp2(b[:, :, 0].astype(np.float32) - 127)
    return QuantisedWeight(_packed(_halves(b, 1)), 4, "e2m1", 32, 1, _flat(scale), dtype=dtype)


def _fifth(blocks: Array, at: int) -> Array:
    """Return the fifth bits of 32 codes, from 4 bytes, as 0 or 16. [n, blocks, 2, 16]"""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, :, at : at + 4]), axis=-1, bitorder="little")
    return bits.reshape(*blocks.shape[:2], 2, 16) << 4


def _q5_0(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    return QuantisedWeight(_flat(_halves(b, 6) | _fifth(b, 2)), 8, None, 32, 1, _flat(_half(b, 0)), 16, dtype=dtype)


def _q5_1(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    codes, scale, minimum = _flat(_halves(b, 8) | _fifth(b, 4)), _flat(_half(b, 0)), _flat(_half(b, 2))
    return QuantisedWeight(codes, 8, None, 32, 1, scale, minimum=minimum, dtype=dtype)


def _q8_0(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    codes = b[:, :, 2:] ^ 128  # int8 to its value + 128
    return QuantisedWeight(_flat(codes), 8, None, 32, 1, _flat(_half(b, 0)), 128, dtype=dtype)


def _q2_k(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    # 16 bytes of scales and minima, 64 of codes, d, dmin
    scales = b[:, :, :16]
    codes = _fields(b[:, :, 16:80].reshape(*b.shape[:2], 2, 32), range(0, 8, 2), 3)
    scale, minimum = _flat(_wide(b, 80) * (scales & 15)), _flat(-(_wide(b, 82) * (scales >> 4)))
    return QuantisedWeight(_packed(codes), 4, None, 16, 1, scale, minimum=minimum, dtype=dtype)


def _q3_k(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    # 32 bytes of third bits, 64 of codes, 12 of sixteen 6-bit scales, d
    third = _fields(b[:, :, :32], range(8), 1)
    codes = _fields(b[:, :, 32:96].reshape(*b.shape[:2], 2, 32), range(0, 8, 2), 3).reshape(third.shape) | third << 2
    low = _fields(b[:, :, 96:104], range(0, 8, 4), 15).reshape(*b.shape[:2], 16)
    high = _fields(b[:, :, 104:108], range(0, 8, 2), 3).reshape(*b.shape[:2], 16)
    scale = _flat(_wide(b, 108) * ((low | high << 4).astype(np.float32) - 32))
    return QuantisedWeight(_packed(codes), 4, None, 16, 1, scale, 4, dtype=dtype, factors=(_flat(_half(b, 108)), None))


def _eight_scales(b: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima of the eight groups of a Q4_K or Q5_K block: d, dmin, 12 bytes of 6-bit numbers."""
    low, mid, top = (b[:, :, i : i + 4] for i in (4, 8, 12))
    scale = np.concatenate([low & 63, (top & 15) | low >> 6 << 4], -1)
    minimum = np.concatenate([mid & 63, top >> 4 | mid >> 6 << 4], -1)
    return _flat(_wide(b, 0) * scale), _flat(-(_wide(b, 2) * minimum))


def _factors(b: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Return d and -dmin, of which those scales and minima are whole multiples."""
    return _flat(_half(b, 0)), _flat(-_half(b, 2))


def _q4_k(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    scale, minimum = _eight_scales(b)
    codes = _packed(_fields(b[:, :, 16:].reshape(*b.shape[:2], 4, 32), range(0, 8, 4), 15))
    return QuantisedWeight(codes, 4, None, 32, 1, scale, minimum=minimum, dtype=dtype, factors=_factors(b))


def _q5_k(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    scale, minimum = _eight_scales(b)
    fifth = _fields(b[:, :, 16:48], range(8), 1)
    low = _fields(b[:, :, 48:].reshape(*b.shape[:2], 4, 32), range(0, 8, 4), 15).reshape(fifth.shape)
    codes = _flat(low | fifth << 4)
    return QuantisedWeight(codes, 8, None, 32, 1, scale, minimum=minimum, dtype=dtype, factors=_factors(b))


def _q6_k(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    # 128 bytes of low 4 bits, 64 of upper 2, 16 int8 scales, d; 128 inputs are four times 32
    high = _fields(b[:, :, 128:192].reshape(*b.shape[:2], 2, 32), range(0, 8, 2), 3)
    low = _fields(b[:, :, :128].reshape(*b.shape[:2], 2, 64), range(0, 8, 4), 15).reshape(high.shape)
    scale = _flat(_wide(b, 208) * np.ascontiguousarray(b[:, :, 192:208]).view(np.int8))
    codes, factors = _flat(low | high << 4), (_flat(_half(b, 208)), None)
    return QuantisedWeight(codes, 8, None, 16, 1, scale, 32, dtype=dtype, factors=factors)


def _iq4_xs(b: Array, dtype: torch.dtype) -> QuantisedWeight:
    # d, 2 bytes of upper bits of eight 6-bit scales, 4 of lower ones, 128 of codes
    high = np.stack([b[:, :, 2 + i // 4] >> 2 * (i % 4) & 3 for i in range(8)], -1)
    low = np.stack([b[:, :, 4 + i // 2] >> 4 * (i % 2) & 15 for i in range(8)], -1)
    scale = _flat(_wide(b, 0) * ((low | high << 4).astype(np.float32) - 32))
    codes = _fields(b[:, :, 8:].reshape(*b.shape[:2], 8, 16), range(0, 8, 4), 15)
    factors = _flat(_half(b, 0)), None
    return QuantisedWeight(_packed(codes), 4, "iq4_nl", 32, 1, scale, dtype=dtype, factors=factors)


_READERS: dict[str, Callable[[Array, torch.dtype], QuantisedWeight]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
