"""PackedWeights: a model's quantised weights in panels and its small tensors, in one file that is read in one piece.

    magic, size of the header (8 bytes), digest of the header (32 bytes), header (JSON), padding, tensors

The tensors are read into huge pages of this process, and each piece is compared with its digest there: no change of
the file, not even one during the read, becomes a weight. Files are replaced as a whole, so that several processes may
write the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from graftlm.kernels import disk_cache
from graftlm.kernels.cpu.huge_pages import huge_buffer
from graftlm.kernels.cpu.linear.packed_codes import PackedCodes, PackedRows, put_packed
from graftlm.kernels.cpu.linear.quantised_panels import QuantisedPanels
from graftlm.kernels.cpu.panel_kind import Arithmetic, PanelKind

_MAGIC = b"GLPANEL1"
_ALIGNMENT = 4096
_PIECE = 8 << 20
"""Bytes with a digest of their own, which a thread reads and compares."""
_SHARE_OF_FREE = 0.1
"""The largest part of the free space on disk that a file may take."""

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32)}


@dataclass(frozen=True)
class PackedWeights:
    """The weights of a model by the names of their tensors; names that share a weight have the same panels."""

    panels: Mapping[str, QuantisedPanels]
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> PackedWeights | None:
        """Return those of a packed model; None without panels, and where another kind of packing has a weight."""
        panels: dict[str, QuantisedPanels] = {}
        for name, module in model.named_modules():
            if isinstance(module, PackedCodes):
                panels[f"{name}.weight"] = module.whole
            elif isinstance(module, PackedRows):
                panels[f"{name}.weight"] = module.panels
            elif isinstance(module, nn.Linear | nn.Embedding):
                return None
        tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        known = all(str(tensor.dtype) in _DTYPES and tensor.is_contiguous() for tensor in tensors.values())
        return cls(panels, tensors) if panels and known else None

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model's state; those of panels take no memory, and `put` replaces them."""
        empty = {name: torch.zeros((), dtype=p.dtype).expand(p.num_out, p.num_in) for name, p in self.panels.items()}
        return {**self.tensors, **empty}

    def put(self, model: nn.Module) -> None:
        """Give a model with the `state` its panels."""
        put_packed(model, self.panels)

    def write(self, path: Path) -> None:
        """Write the file; a disk that is full, or has little space, changes nothing."""
        parts: list[torch.Tensor] = []
        placed: dict[int, tuple[object, ...]] = {}
        size = 0

        def place(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
            nonlocal size
            if tensor is None:
                return None
            if tensor.data_ptr() not in placed:
                placed[tensor.data_ptr()] = (str(tensor.dtype), list(tensor.shape), size)
                parts.append(tensor)
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            return placed[tensor.data_ptr()]

        header: dict[str, Any] = {"tensors": {name: place(tensor) for name, tensor in self.tensors.items()}}
        header["panels"] = {
            name: [place(p.packed), place(p.table), place(p.order), p.num_out, p.num_in, p.kind.arguments,
                   int(p.arithmetic), str(p.dtype)]
            for name, p in self.panels.items()
        }  # fmt: skip
        header["pieces"] = [hashlib.sha256(piece).hexdigest() for piece in _pieces(parts)]
        header["size"] = size
        encoded = json.dumps(header).encode()
        with suppress(OSError):
            if size > _SHARE_OF_FREE * shutil.disk_usage(path.parent).free:
                return

        def fill(file: BinaryIO) -> None:
            file.write(_MAGIC + len(encoded).to_bytes(8, "little") + hashlib.sha256(encoded).digest() + encoded)
            file.write(bytes(_first(len(encoded)) - file.tell()))
            for piece in _pieces(parts):
                file.write(piece)

        disk_cache.replace_file(path, fill)

    @classmethod
    def read(cls, path: Path) -> PackedWeights | None:
        """Read a file; None if it is missing. A damaged file is deleted."""
        with disk_cache.opened(path) as file:
            if file is None:
                return None
            with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
                found = cls._read(file)
                if found is not None:
                    os.utime(path)  # `trim` keeps the last used files
                    return found
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None

    @classmethod
    def _read(cls, file: BinaryIO) -> PackedWeights | None:
        start = file.read(48)
        length = int.from_bytes(start[8:16], "little")
        if start[:8] != _MAGIC or length > os.fstat(file.fileno()).st_size:
            return None
        encoded = file.read(length)
        if hashlib.sha256(encoded).digest() != start[16:]:
            return None
        header = json.loads(encoded)
        data = huge_buffer(header["size"])
        view, number, first = _bytes_of(data), file.fileno(), _first(length)

        def read(index: int) -> bool:
            here = view[index * _PIECE : (index + 1) * _PIECE]
            done = 0
            while done < len(here):
                count = os.preadv(number, [here[done:]], first + index * _PIECE + done)
                if count == 0:
                    return False
                done += count
            return bool(hashlib.sha256(here).hexdigest() == header["pieces"][index])

        with ThreadPoolExecutor(min(torch.get_num_threads(), 8)) as threads:
            if not all(threads.map(read, range(len(header["pieces"])))):
                return None

        def tensor(place: list[Any]) -> torch.Tensor:
            dtype, shape, offset = _DTYPES[place[0]], place[1], place[2]
            count = torch.Size(shape).numel() * dtype.itemsize
            return data[offset : offset + count].view(dtype).view(shape)

        panels = {
            name: QuantisedPanels(
                tensor(packed), tensor(table), None, num_out, num_in, PanelKind.of(*kind), Arithmetic(arithmetic),
                tensor(order) if order is not None else None, _DTYPES[dtype],
            )
            for name, (packed, table, order, num_out, num_in, kind, arithmetic, dtype) in header["panels"].items()
        }  # fmt: skip
        return cls(panels, {name: tensor(place) for name, place in header["tensors"].items()})


def _first(length: int) -> int:
    """Return the offset of the tensors behind a header of so many bytes."""
    return -(-(48 + length) // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _pieces(parts: list[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of tensors, each padded to the alignment, in pieces of `_PIECE` bytes."""
    held = bytearray()
    for part in parts:
        held += _bytes_of(part)
        held += bytes(-len(held) % _ALIGNMENT)
        while len(held) >= _PIECE:
            yield memoryview(bytes(held[:_PIECE]))
            del held[:_PIECE]
    if held:
        yield memoryview(bytes(held))
