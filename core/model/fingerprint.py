"""A digest that tells one set of weights from another without reading all of them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from graftlm.core.config import EngineConfig

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_SMALL = 1 << 20


def model_fingerprint(model: Any, config: EngineConfig) -> str:
    """Equal for equal weights, tokenizer and precision, that of KV included. 16 hexadecimal digits.

    A folder is read in part: small files whole, of large ones their size and 64 samples. A loaded model gives a
    sample of each parameter. A Hugging Face id stands for itself where its files are not on this machine.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{config.dtype} {config.quantization} {config.strict} {config.cache.dtype}".encode())
    if isinstance(model, str | os.PathLike):
        _add_source(digest, os.fspath(model))
    else:
        _add_parameters(digest, model)
    return digest.hexdigest()


def _add_source(digest: hashlib.blake2b, name: str) -> None:
    from graftlm.core.model.load import resolve

    folder = Path(resolve(name))
    if not folder.is_dir():
        digest.update(name.encode())
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            return
        folder = Path(cached).parent  # the snapshot's name is the commit
        digest.update(folder.name.encode())
        return
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        digest.update(path.name.encode())
        _add_file(digest, path)


def _add_file(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _SMALL:
            digest.update(file.read())
            return
        for i in range(_SAMPLES):
            file.seek(i * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def _add_parameters(digest: hashlib.blake2b, model: Any) -> None:
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(flat.numel() // 64, 1)][:64].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
