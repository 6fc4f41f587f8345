"""A GGUF model as a folder of Hugging Face files, which describes it; its weights stay in the GGUF file.

The folder has config.json, the tokenizer's files and gguf.json, which names the GGUF files. It is in the cache of this
machine, named by path, size and time of the files, so that later processes find it. Imports no torch.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from graftlm.core.errors import ModelError
from graftlm.core.model.gguf.families import configuration, family_of
from graftlm.core.model.gguf.metadata_check import check_metadata
from graftlm.core.model.gguf.reader import MAGIC, GgufFile, all_parts, read_gguf
from graftlm.core.model.gguf.vocabulary import tokenizer_files
from graftlm.kernels import disk_cache

LIST = "gguf.json"
"""The file of the folder that names the GGUF files; a folder is complete when it has this file."""

OLLAMA = "ollama:"

_BESIDE = ("mmproj", "imatrix")
"""Words in the names of files beside a model: projectors of images, importance matrices."""

_KEPT = 32
"""The number of descriptions that the cache keeps."""


def find_gguf(model: str) -> Path | None:
    """Return the GGUF file that a model's name means: a path, a folder that has one, or "ollama:NAME[:TAG]".

    None for other models. Raises ModelError for a folder with several, and for a name that Ollama does not have.
    """
    if model.startswith(OLLAMA):
        return _ollama_blob(model)
    path = Path(model).expanduser()
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" or _begins_as_gguf(path) else None
    if not path.is_dir() or _has_weights(path):
        return None
    found = [file for file in sorted(path.iterdir()) if file.suffix.lower() == ".gguf" and file.is_file()]
    found = [file for file in found if not any(word in file.name.lower() for word in _BESIDE)]
    models = {all_parts(file)[0] for file in found}
    if len(models) > 1:
        names = ", ".join(sorted(repr(file.name) for file in models))
        raise ModelError(f"the folder {model!r} has {len(models)} models: {names}; give the path of one of them")
    return models.pop() if models else None


def description_folder(path: Path) -> Path:
    """Return the folder that describes a GGUF file, written at the first call for these files.

    Raises ModelError for a file that cannot be read, and for an architecture or tokenizer that is not known.
    """
    parts = tuple(part.absolute() for part in all_parts(path))
    return _described(parts, tuple((os.stat(p).st_size, os.stat(p).st_mtime_ns) for p in parts))


def description_files(file: GgufFile) -> dict[str, Any]:
    """Return the JSON values of the files that describe a model, by their names.

    Raises ModelError for an unknown architecture or tokenizer, and for metadata that is missing or of a wrong kind.
    """
    family_of(file)
    check_metadata(file)
    try:
        return {"config.json": configuration(file), **tokenizer_files(file)}
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"the metadata of {str(file.paths[0])!r} lacks a value, or has one of a wrong kind "
            f"({type(error).__name__}: {error}); convert the model again with a current llama.cpp"
        ) from error


def listed_gguf(folder: str | os.PathLike[str]) -> GgufFile | None:
    """Return the GGUF file that a folder describes; None for other folders."""
    path = Path(folder) / LIST
    if not path.is_file():
        return None
    return read_gguf(Path(json.loads(path.read_text(encoding="utf-8"))["files"][0]["path"]))


@functools.lru_cache(maxsize=16)
def _described(parts: tuple[Path, ...], versions: tuple[tuple[int, int], ...]) -> Path:
    listed = [
        {"path": str(path), "size": size, "time": time} for path, (size, time) in zip(parts, versions, strict=True)
    ]
    key = hashlib.blake2b((json.dumps(listed) + _code()).encode(), digest_size=12).hexdigest()
    cache = disk_cache.private_folder("gguf")
    if cache is not None and (cache / key).exists() and not (cache / key).is_dir():
        cache = None  # something else has the name
    folder = cache / key if cache is not None else Path(tempfile.mkdtemp(prefix="graftlm-gguf-"))
    if cache is None:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    elif (folder / LIST).is_file():
        os.utime(folder)
        return folder
    file = read_gguf(parts[0])
    files: dict[str, Any] = {**description_files(file), LIST: {"files": listed}}
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():  # the list last
        building = folder / f".{os.getpid()}-{name}"
        building.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        building.replace(folder / name)
    if cache is not None:
        _trim(cache)
    return folder


def _trim(cache: Path) -> None:
    folders = sorted((path for path in cache.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_KEPT]:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _code() -> str:
    """Return a digest of the code that writes descriptions."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("folder.py", "families.py", "metadata_check.py", "vocabulary.py", "reader.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def _has_weights(folder: Path) -> bool:
    """Return True if a folder has the weights of a Hugging Face model."""
    return any(next(folder.glob(pattern), None) is not None for pattern in ("*.safetensors", "*.bin"))


# -- Ollama --------------------------------------------------------------------------------------------------------


def _ollama_blob(model: str) -> Path:
    """Return the file of a model that Ollama has downloaded: manifests/REGISTRY/NAMESPACE/NAME/TAG lists its blobs."""
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()
    name, _, tag = model.removeprefix(OLLAMA).partition(":")
    places = name.split("/")
    if len(places) == 1:
        places = ["library", *places]
    if len(places) == 2:
        places = ["registry.ollama.ai", *places]
    manifest = root.joinpath("manifests", *places, tag or "latest")
    if not name or ".." in places or not manifest.is_file():
        known = ", ".join(repr(OLLAMA + known) for known in _ollama_names(root)[:12])
        has = f"it has {known}" if known else "it has none"
        raise ModelError(
            f"Ollama has no model {model!r} in {str(root)!r} ({has}); run `ollama pull {name or 'NAME'}`, or set "
            "OLLAMA_MODELS to the folder that has it"
        )
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"].endswith("image.model")]
        adapters = [layer for layer in layers if layer["mediaType"].endswith("image.adapter")]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"Ollama's manifest {str(manifest)!r} is damaged; run `ollama pull {name}`") from error
    blob = root / "blobs" / str(digests[0] if digests else "").replace(":", "-")
    if not digests or not blob.is_file():
        raise ModelError(f"{model!r} has no file {str(blob)!r}; run `ollama pull {name}`")
    if adapters:
        raise ModelError(
            f"{model!r} has an adapter beside its weights, which is not supported; merge it into the model"
        )
    return blob


def _ollama_names(root: Path) -> list[str]:
    """Return the names of the models that Ollama has, as its command line writes them."""
    manifests = root / "manifests"
    names: list[str] = []
    for file in sorted(manifests.glob("*/*/*/*")) if manifests.is_dir() else ():
        registry, space, name, tag = file.relative_to(manifests).parts
        short = name if (registry, space) == ("registry.ollama.ai", "library") else f"{space}/{name}"
        short = short if registry == "registry.ollama.ai" else f"{registry}/{short}"
        names.append(short if tag == "latest" else f"{short}:{tag}")
    return names
