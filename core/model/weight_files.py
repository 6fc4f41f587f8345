"""Files of weights: what of them need not stay in memory while a model is read, and after its weights were packed."""

from __future__ import annotations

import json
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from graftlm.kernels.cpu.mapped_files import MappedFiles

if TYPE_CHECKING:
    from torch import nn

    from graftlm.core.fusion.linears import Fusions

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""What safetensors calls dtypes."""


def converted_files(source: str, dtype: torch.dtype | str) -> list[Path]:
    """The files in a folder of which every tensor is converted to `dtype` when it is read; none for "auto".

    What is mapped of them is read once.
    """
    wanted = _NAMES.get(dtype) if isinstance(dtype, torch.dtype) else None
    if wanted is None or not os.path.isdir(source):
        return []
    return [path for path in sorted(Path(source).glob("*.safetensors")) if wanted not in _dtypes_in(path)]


def _dtypes_in(path: Path) -> set[str]:
    """The dtypes of a file of safetensors, by their names there; all of them if it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, struct.error), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, path.stat().st_size)))
        return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return set(_NAMES.values())


def leave_files(model: nn.Module, fusions: Fusions) -> None:
    """Copy the weights that are still mapped from files, when most others have been repacked into memory.

    One of them keeps the whole mapping, and with it every page that was read, counted as this process's memory.
    """
    if fusions.num_packed:
        files = MappedFiles()
        for parameter in model.parameters():
            if parameter.data in files:
                parameter.data = parameter.data.clone()
