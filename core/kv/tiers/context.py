"""The context of files of KV: everything beside the tokens that changes a number in them, in words."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlm.core.config import EngineConfig
from graftlm.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from graftlm.core.loaded_model import LoadedModel
    from graftlm.kernels.attention import Attention

FORMAT = 1
"""Version of the files' format and of the keys in their names."""

_OBJECT = "tensors"
_CHUNK = 1 << 22
"""Numbers of a tensor that are summed up at once."""


def check_folder(config: EngineConfig) -> Path | None:
    """Create the folder of the configuration and return it; None if there is none.

    Raises ConfigError for one that other users own or can write to, or that cannot be created.
    """
    if config.cache.folder is None:
        return None
    folder = Path(os.fspath(config.cache.folder)).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"CacheConfig.folder {str(folder)!r} cannot be used: {error}; give another folder") from error
    if hasattr(os, "getuid"):
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"CacheConfig.folder {str(folder)!r} belongs to user {found.st_uid}, this process runs as user "
                f"{os.getuid()}: KV from there cannot be trusted; give a folder of your own"
            )
        if found.st_mode & 0o022:
            raise ConfigError(
                f"CacheConfig.folder {str(folder)!r} has mode {found.st_mode & 0o777:o}, so others can write KV there; "
                f"it must be 700: chmod 700 {folder}"
            )
    return folder


def weights_identity(model: Any) -> str:
    """Return a digest of a model's weights that any change of them changes.

    Of a name or folder the names, sizes and times of change of all files, of an object the checksums of all tensors.
    """
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(model, str | os.PathLike):
        folder = _folder_of(os.fspath(model))
        if folder is None:
            raise ConfigError(f"CacheConfig.folder needs the files of {model!r}, which are not on this machine")
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            found = path.stat()
            digest.update(f"{path.relative_to(folder)} {found.st_size} {found.st_mtime_ns}\n".encode())
        return f"files {digest.hexdigest()}"
    for name, tensor in sorted(model.state_dict().items()):
        if hasattr(tensor, "dtype"):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}\n".encode())
    return f"{_OBJECT} {digest.hexdigest()}"


def context_of(
    identity: str, loaded: LoadedModel, config: EngineConfig, attention: Attention, layout: str, *, rank: str = "0 of 1"
) -> str:
    """Return the context of a model's files. rank: of this process, in tensor parallel"""
    import torch

    device = loaded.device
    if device.type == "cuda":
        place = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    else:
        place = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    lines = {
        "format": FORMAT,
        "weights": identity,
        "layout": layout,
        "rank": rank,
        "computed in": f"{loaded.dtype} {config.quantization} {config.activations} strict={config.strict}",
        "attention": type(attention).__qualname__,
        "execution": loaded.execution,
        "device": place,
        "versions": " ".join(f"{name} {_version(name)}" for name in ("graftlm", "torch", "transformers", "triton")),
    }
    if identity.startswith(_OBJECT):  # otherwise a file has it
        lines["configuration"] = loaded.hf_config.to_json_string(use_diff=False)
    return "\n".join(f"{name}: {value}" for name, value in lines.items()) + "\n"


def _folder_of(name: str) -> Path | None:
    """Return the folder with the files of a model; None if it is not on this machine."""
    from graftlm.core.model.description import resolve

    folder = Path(resolve(name))
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _checksum(tensor: torch.Tensor) -> str:
    """Return two sums of all bits of a tensor, each number weighted by its place, computed on its device."""
    import torch

    bits = tensor.detach().reshape(-1).contiguous()
    size = bits.numel() * bits.element_size()
    bits = bits.view(torch.int32 if size % 4 == 0 and bits.element_size() <= 4 else torch.uint8)
    first = second = 0
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].long()
        place = torch.arange(start, start + len(part), device=part.device)
        mixed = (part + place * 0x9E3779B1) * ((place << 1 | 1) * 0x5851F42D)
        first += int(mixed.sum())
        second += int((mixed ^ (mixed >> 29)).mul_(0x2545F491).sum())
    return f"{first % 2**64:x}.{second % 2**64:x}"
