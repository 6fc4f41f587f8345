"""LoadRecord: the files that an earlier load of a model left: a note that its self-tests passed, and packed weights.

The name of the files is a digest of everything that changes a number of the load: the identity of the weight files,
their sampled content, the options, the processor, threads, versions, environment and this package's code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import graftlm
from graftlm.core.config import EngineConfig
from graftlm.core.model.gguf.folder import LIST
from graftlm.core.model.remembered.packed_weights import PackedWeights
from graftlm.kernels import disk_cache
from graftlm.kernels.cpu.compiled import object_code

_KEPT = 64
"""The number of records that the cache folder keeps."""
_KEPT_WEIGHTS = 8
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "llvmlite", "numba")
_VARIABLES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "TORCH_")
"""Beginnings of the names of environment variables that choose kernels."""
_OPTIONS = ("activations", "attention", "compact_weights", "dtype", "max_model_len", "quantization", "strict")


@dataclass(frozen=True)
class LoadRecord:
    """The record of a load of a folder's model on a CPU.

    key     of its files in the cache folder; None where nothing is remembered
    tested  whether an earlier load with this key passed all of its self-tests
    """

    source: str
    config: EngineConfig
    key: str | None
    tested: bool = False

    @classmethod
    def find(cls, source: str, config: EngineConfig) -> LoadRecord:
        """Return the record of a load that is about to begin; one without a key for models with code of their own."""
        if not os.path.isdir(source) or config.trust_remote_code:
            return cls(source, config, None)
        with suppress(OSError, ValueError):  # the loader reports the error
            key = _key(source, config)
            path = _path("self-tests", f"{key}.record")
            return cls(source, config, key, path is not None and disk_cache.load_arrays(path) is not None)
        return cls(source, config, None)

    def weights(self) -> PackedWeights | None:
        """Read the packed weights; None if there are none, or their file is damaged."""
        path = _path("packed-weights", f"{self.key}.weights") if self.tested else None
        return PackedWeights.read(path) if path is not None else None

    def keep(self, model: torch.nn.Module) -> None:
        """Write the record of a load that passed, unless its files have changed meanwhile."""
        with suppress(OSError, ValueError):
            if self.key is None or self.tested or _key(self.source, self.config) != self.key:
                return
            path = _path("packed-weights", f"{self.key}.weights")
            packed = PackedWeights.of(model) if path is not None else None
            if path is not None and packed is not None:
                packed.write(path)
                disk_cache.trim(path.parent, _KEPT_WEIGHTS)
            path = _path("self-tests", f"{self.key}.record")
            if path is not None:
                disk_cache.save_arrays(path, {"passed": np.ones(1, np.bool_)})
                disk_cache.trim(path.parent, _KEPT)


def _path(folder: str, name: str) -> Path | None:
    found = disk_cache.private_folder(folder)
    return found / name if found is not None else None


def _key(source: str, config: EngineConfig) -> str:
    from graftlm.core.model.fingerprint import model_fingerprint

    options = [f"{name}={getattr(config, name)!r}" for name in _OPTIONS]
    parts = model_fingerprint(source, config), options, config.cache.dtype, list(_identities(source)), _machine()
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _identities(source: str) -> Iterator[tuple[str, int, int, int, int, int]]:
    """Yield name and identity of each weight file; every write changes its ctime, which nobody can set back."""
    folder = Path(source)
    paths = [path for path in folder.iterdir() if path.suffix in _WEIGHTS]
    if (folder / LIST).is_file():
        paths += [Path(file["path"]) for file in json.loads((folder / LIST).read_text(encoding="utf-8"))["files"]]
    for path in sorted(paths):
        found = path.stat()
        yield str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _machine() -> tuple[object, ...]:
    """Return everything beside model and options that changes a number: processor, threads, versions, code."""
    name, features = object_code.processor()
    variables = sorted((key, value) for key, value in os.environ.items() if key.startswith(_VARIABLES))
    flags = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    return name, sorted(features), flags, variables, _versions()


@functools.cache
def _versions() -> str:
    """Return a digest of the versions of Python and packages, and of the code of core/ and kernels/."""
    digest = hashlib.blake2b(sys.version.encode(), digest_size=16)
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{package} {disk_cache.version_of(package)}".encode())
    root = Path(graftlm.__file__).parent
    for path in sorted(path for part in ("core", "kernels") for path in (root / part).resolve().rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
