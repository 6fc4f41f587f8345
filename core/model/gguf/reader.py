"""The header of a GGUF file: metadata, and where each tensor is. Reads no tensor and imports no torch.

A file: "GGUF", version, number of tensors, number of metadata entries; the entries; name, shape, type and offset of
each tensor; then the tensors' bytes, aligned. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graftlm.core.errors import ModelError

MAGIC = b"GGUF"

_AGAIN = "download it again"


class BlockType(NamedTuple):
    """How a type of tensor is stored: `num_bytes` for each block of `size` neighbouring inputs."""

    name: str
    size: int
    num_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2), 28: BlockType("F64", 1, 8),
    2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34), 10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110), 12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210), 16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98), 19: BlockType("IQ1_S", 256, 50), 20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110), 22: BlockType("IQ2_S", 256, 82), 23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56), 34: BlockType("TQ1_0", 256, 54), 35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}  # fmt: skip
"""The types of tensors by their numbers in a file."""

_UNREAD = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
    42: "Q2_0",
}  # fmt: skip
"""Names of llama.cpp's other types, for messages."""


class TensorInfo(NamedTuple):
    """A tensor in a file. `shape` has the outputs first and the inputs last."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A model's metadata and tensors, of all of its files."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata of the file's own architecture."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token; None if the file has none, or an id that no token has, as llama.cpp does.

        Converters write 2^32 - 1 for none.
        """
        found = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return None if found is None or (tokens and not 0 <= found < len(tokens)) else int(found)

    def floats(self, name: str) -> npt.NDArray[np.float32] | None:
        """Return a small tensor of float32; None if the file has none of this name."""
        info = self.tensors.get(name)
        if info is None:
            return None
        if info.kind.name != "F32":
            raise ModelError(f"{name!r} in {str(info.path)!r} is {info.kind.name}, expected F32; {_AGAIN}")
        return np.fromfile(info.path, np.float32, info.num_bytes // 4, offset=info.offset)


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of a file, and of the other files of a model that is split.

    Raises ModelError if a file is missing, truncated or no GGUF file.
    """
    paths = all_parts(path)
    return _read(paths, tuple((os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in paths))


_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def all_parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a model by one of them, in order. Raises ModelError if one is missing."""
    split = _PART.search(path.name)
    if split is None:
        return (path,)
    count = int(split[2])
    parts = [path.with_name(f"{path.name[: split.start()]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(
            f"{str(path)!r} is one of {count} files of a model, {len(missing)} are missing, {missing[0]!r} first; "
            "download them into the same folder"
        )
    return tuple(parts)


@lru_cache(maxsize=4)
def _read(paths: tuple[Path, ...], _versions: Sequence[tuple[int, int]]) -> GgufFile:
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for path in paths:
        found = _Header(path).read()
        metadata = found[0] | metadata  # the first file has the model's
        twice = next((name for name in found[1] if name in tensors), None)
        if twice is not None:
            raise ModelError(
                f"{twice!r} is in {str(tensors[twice].path)!r} and in {str(path)!r}: they are parts of different "
                f"models; {_AGAIN}"
            )
        tensors |= found[1]
    expected = metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(
            f"the files of {str(paths[0])!r} have {len(tensors)} tensors, expected {expected}: they are parts of "
            f"different models; {_AGAIN}"
        )
    _check_model(paths, metadata)
    return GgufFile(paths, metadata, tensors)


_OTHER_FILES = {
    "adapter": "a LoRA adapter: merge it into its model (llama-export-lora of llama.cpp), and give the merged file",
    "mmproj": "the projector of a vision model: give the file of its language model",
    "clip": "the projector of a vision model: give the file of its language model",
    "imatrix": "the importance matrix of a quantization: give the file of the model",
    "controlvector": "a control vector: give the file of the model",
}
"""Values of general.type and general.architecture for files that hold no model."""


def _check_model(paths: tuple[Path, ...], metadata: dict[str, Any]) -> None:
    """Raise ModelError for a file that holds no model, or a part of one under another name."""
    name = str(paths[0])
    kind = "adapter" if "adapter.type" in metadata else metadata.get("general.type", "model")
    other = _OTHER_FILES.get(str(kind)) or _OTHER_FILES.get(str(metadata.get("general.architecture")))
    if other is not None:
        raise ModelError(f"{name!r} is no model but {other}")
    count = metadata.get("split.count", 1)
    if len(paths) == 1 and count not in (0, 1):
        number = metadata.get("split.no", 0)
        raise ModelError(
            f"{name!r} is a part (split.no {number!r}) of a model in {count!r} files, whose names must end in "
            "'-00001-of-0000N.gguf': rename them, or merge them with llama-gguf-split of llama.cpp"
        )
    if "general.architecture" not in metadata:
        raise ModelError(f"{name!r} names no architecture: it holds no model; give the model's own file")


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DEEP = 8
"""Dimensions of a tensor, and nested arrays, at most: the format has 4 and 1."""


class _Header:
    """A reader of one file's header, at a position that moves on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        try:
            with self._path.open("rb") as file:
                self._size = os.fstat(file.fileno()).st_size
                if file.read(4) != MAGIC:
                    raise ModelError(f"{str(self._path)!r} is no GGUF file: it does not begin with 'GGUF'; {_AGAIN}")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._bytes:
                    return self._read()
        except (struct.error, IndexError, OverflowError, MemoryError) as error:
            raise ModelError(
                f"{str(self._path)!r} ends inside its header, after {self._size:,} bytes: it is truncated or damaged; "
                f"{_AGAIN}"
            ) from error

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            order = "big-endian" if version >= 1 << 16 else f"of version {version}"
            raise ModelError(
                f"{str(self._path)!r} is a GGUF file {order}; versions 2 and 3, little-endian, are read: convert the "
                "model again with a current llama.cpp"
            )
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            if key in metadata:
                raise ModelError(f"{str(self._path)!r} has the metadata {key!r} twice: it is damaged; {_AGAIN}")
            metadata[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & alignment - 1:
            raise ModelError(
                f"{str(self._path)!r} aligns its tensors to {alignment!r} bytes, expected a power of two: it is "
                f"damaged; {_AGAIN}"
            )
        start = end = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry[0] in tensors:
                raise ModelError(f"{str(self._path)!r} has the tensor {entry[0]!r} twice: it is damaged; {_AGAIN}")
            tensors[entry[0]] = self._info(*entry, start)
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            expected = -(-end // alignment) * alignment
            if tensor.offset != expected:
                raise ModelError(
                    f"{tensor.name!r} {list(tensor.shape)} in {str(self._path)!r} begins at byte {tensor.offset:,}, "
                    f"expected {expected:,} after the tensor before: a type or shape is damaged; {_AGAIN}"
                )
            end = tensor.offset + tensor.num_bytes
        return metadata, tensors

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        start = self._at + 8
        self._at = start + self._number("Q")
        if self._at > self._size:
            raise IndexError
        return self._bytes[start : self._at].decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            number = self._number(_NUMBERS[kind])
            return float(str(np.float32(number))) if _NUMBERS[kind] == "f" else number  # 1e-06, not 9.99999997e-07
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > _MOST_DEEP:
            raise IndexError
        element, count = self._number("I"), self._number("Q")
        if element == _STRING:
            return [self._string() for _ in range(count)]
        if element not in _NUMBERS:
            return [self._value(element, depth + 1) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_NUMBERS[element]}", self._bytes, self._at)
        self._at += count * struct.calcsize(_NUMBERS[element])
        return list(values)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._number("I")
        if num_dims > _MOST_DEEP:
            raise IndexError
        shape = tuple(self._number("Q") for _ in range(num_dims))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _info(self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int) -> TensorInfo:
        kind = BLOCK_TYPES.get(number)
        if kind is None or not shape or shape[-1] % kind.size:
            named = f"{_UNREAD[number]} (type {number})" if number in _UNREAD else f"type {number}"
            stored = named if kind is None else f"blocks of {kind.size} ({kind.name})"
            raise ModelError(
                f"{name!r} {list(shape)} in {str(self._path)!r} is stored as {stored}, which cannot be read; use a "
                "file in Q4_K_M, Q8_0 or another type that docs/quantised.md lists"
            )
        num_bytes = prod(shape) // kind.size * kind.num_bytes
        if start + offset + num_bytes > self._size:
            raise ModelError(
                f"{str(self._path)!r} is truncated: {name!r} ends at byte {start + offset + num_bytes:,}, the file has "
                f"{self._size:,}; {_AGAIN}"
            )
        return TensorInfo(name, shape, kind, self._path, start + offset, num_bytes)
