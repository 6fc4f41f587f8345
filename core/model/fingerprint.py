"""Model fingerprint: a digest of weights, tokenizer and precision that reads a part of each tensor."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from graftlm.core.config import EngineConfig

PIECE_BYTES = 4096
PIECES_PER_TENSOR = 16
"""Pieces of a tensor that are digested: all of a small tensor, of a larger one this many at equal distances."""

PIECES_PER_FILE = 1024
"""Pieces of a large file in another format than safetensors that are digested."""

SMALL_FILE_BYTES = 1 << 20
"""Bytes: files up to this size are digested whole."""


def model_fingerprint(model: Any, config: EngineConfig) -> str:
    """Return a digest of weights, tokenizer and precision, that of KV included. 16 hexadecimal digits.

    Guarantee: other names, shapes, dtypes or offsets of tensors, another small file, or another byte in the sampled
    pieces yield another fingerprint, but for one chance in 2^64. Every tensor is sampled, so a fine-tune that changes
    whole tensors has another fingerprint; a change of a few values within one large tensor may not. The digest of a
    Hugging Face id whose files are not all on this machine is that of its commit, or of the id itself.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{config.dtype} {config.quantization} {config.strict} {config.cache.dtype}".encode())
    if isinstance(model, str | os.PathLike):
        _add_source(digest, os.fspath(model), config.revision)
    else:
        _add_parameters(digest, model)
    return digest.hexdigest()


def _add_source(digest: hashlib.blake2b, name: str, revision: str | None) -> None:
    from graftlm.core.model.description import resolve

    folder = Path(resolve(name, revision=revision))
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
        if size <= SMALL_FILE_BYTES:
            digest.update(file.read())
        elif path.suffix == ".safetensors":
            _add_tensors(digest, file, size)
        else:
            _add_pieces(digest, file, 0, size, PIECES_PER_FILE)


def _add_tensors(digest: hashlib.blake2b, file: BinaryIO, size: int) -> None:
    """Add a safetensors file: its header (8 bytes of length, then JSON with each tensor's offsets) and its tensors."""
    length = int.from_bytes(file.read(8), "little")
    header = file.read(min(length, size - 8))
    digest.update(header)
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        ranges = [(8 + length + int(start), 8 + length + int(stop)) for start, stop in tensors]
        if any(not 8 <= start <= stop <= size for start, stop in ranges):
            raise ValueError("a tensor lies outside of the file")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        # loading the file raises a clear error
        ranges = [(0, size)]
    for start, stop in sorted(ranges):
        _add_pieces(digest, file, start, stop, PIECES_PER_TENSOR)


def _add_pieces(digest: hashlib.blake2b, file: BinaryIO, start: int, stop: int, count: int) -> None:
    """Add the bytes [start, stop), or `count` pieces of them from the first to the last."""
    if stop - start <= count * PIECE_BYTES:
        file.seek(start)
        digest.update(file.read(max(stop - start, 0)))
        return
    for i in range(count):
        file.seek(start + i * (stop - start - PIECE_BYTES) // (count - 1))
        digest.update(file.read(PIECE_BYTES))


def _add_parameters(digest: hashlib.blake2b, model: Any) -> None:
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(flat.numel() // PIECE_BYTES, 1)].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
