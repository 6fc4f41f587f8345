"""The Hugging Face hub: whether model files are requested from it or read from the local cache only, and from where.

The hub's own client requests each file six times before it reads the cache, 30 s per file without a network.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 5.0
"""Timeout of the request to the hub, in seconds."""

_FRESH_S = 60.0


class _Answer(NamedTuple):
    """The hub's answer about a model: the reason of a failure, else the commit of its main branch where it is known."""

    at_s: float
    failure: str | None = None
    commit: str | None = None


_asked: dict[str, _Answer] = {}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_OPTIONAL = ("generation_config.json", "tokenizer_config.json")


def only_local(source: str) -> bool:
    """Return True if a folder or Hugging Face id must be read without the network."""
    return os.path.isdir(source) or unreachable(source) is not None


def unreachable(model_id: str) -> str | None:
    """Return the reason why the hub cannot serve the files of a model; None if it responds, even with an error.

    Sends at most one request a minute.
    """
    return _answer(model_id).failure


def _answer(model_id: str) -> _Answer:
    known = _asked.get(model_id)
    if known is None or time.monotonic() - known.at_s >= _FRESH_S:
        known = _asked[model_id] = _ask(model_id)
    return known


def complete_folder(model_id: str) -> str | None:
    """Return the folder of a model in the hub's cache; None unless it has the hub's newest files, and all of them.

    A hub that cannot be reached leaves what the cache has. None too for models with code or with pictures, which read
    further files later.
    """
    from huggingface_hub import try_to_load_from_cache

    with suppress(OSError, ValueError):
        answer = _answer(model_id)
        if answer.failure is None and answer.commit is None:
            return None
        found = try_to_load_from_cache(model_id, "config.json", revision=answer.commit)
        if not isinstance(found, str):
            return None
        config = json.loads(Path(found).read_text(encoding="utf-8"))
        folder = Path(found).parent
        known = answer.failure is not None or all(
            try_to_load_from_cache(model_id, name, revision=answer.commit) is not None for name in _OPTIONAL
        )
        has_text = any((folder / name).is_file() for name in _TOKENIZERS)
        if known and has_text and _has_weights(folder) and not {"auto_map", "vision_config"} & config.keys():
            return str(folder)
    return None


def _has_weights(folder: Path) -> bool:
    index = folder / "model.safetensors.index.json"
    names: Iterable[str] = ("model.safetensors",)
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / name).is_file() for name in names)


def why_not(source: str, error: Exception) -> str:
    """Return the message for a model whose files could not be read."""
    near = [] if os.path.isdir(source) else near_names(source)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    said = f"{type(error).__name__}: {str(error)[:1500]}{hint}"
    reason = None if os.path.isdir(source) else unreachable(source)
    if reason is None:
        return said
    return (
        f"the Hugging Face hub cannot be reached ({reason}), and the files in its cache do not suffice; connect, or "
        f"give a local folder ({said})"
    )


def near_names(model: str) -> list[str]:
    """Return names like `model`, nearest first: the embedded model's, and those of the models in the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = [
        folder.name.removeprefix("models--").replace("--", "/") for folder in Path(HF_HUB_CACHE).glob("models--*")
    ]
    return [] if model in cached else get_close_matches(model, ["sprout", *cached], cutoff=0.75)


def _ask(model_id: str) -> _Answer:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    failure = None
    try:
        found = get_hf_file_metadata(
            hf_hub_url(model_id, "config.json", endpoint=os.environ.get("HF_ENDPOINT")), timeout=TIMEOUT_S
        )
        return _Answer(time.monotonic(), commit=found.commit_hash)
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        failure = f"it answers {status}" if status >= 500 else None
    except ValueError:  # not a valid id of a hub: reading the files raises the error
        pass
    except Exception as error:  # the client's errors differ between its versions; the system's are OSErrors
        failure = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no answer'}"
    return _Answer(time.monotonic(), failure)
