"""Reachability of the Hugging Face hub: whether model files are requested from it or read from the local cache only.

The hub's own client requests each file six times before it reads the cache, 30 s per file without a network.
"""

from __future__ import annotations

import os
import time
from difflib import get_close_matches
from pathlib import Path

TIMEOUT_S = 5.0
"""Timeout of the request to the hub, in seconds."""

_FRESH_S = 60.0
_asked: dict[str, tuple[float, str | None]] = {}
"""For each model the time of the last request to the hub, and the reason of its failure, or None."""


def only_local(source: str) -> bool:
    """Return True if a folder or Hugging Face id must be read without the network."""
    return os.path.isdir(source) or unreachable(source) is not None


def unreachable(model_id: str) -> str | None:
    """Return the reason why the hub cannot serve the files of a model; None if it responds, even with an error.

    Sends at most one request a minute.
    """
    known = _asked.get(model_id)
    if known is not None and time.monotonic() - known[0] < _FRESH_S:
        return known[1]
    reason = _ask(model_id)
    _asked[model_id] = time.monotonic(), reason
    return reason


def why_not(source: str, error: Exception) -> str:
    """Return the message for a model whose files could not be read."""
    near = [] if os.path.isdir(source) else near_names(source)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    said = f"{type(error).__name__}: {str(error)[:500]}{hint}"
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


def _ask(model_id: str) -> str | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(
            hf_hub_url(model_id, "config.json", endpoint=os.environ.get("HF_ENDPOINT")), timeout=TIMEOUT_S
        )
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        return f"it answers {status}" if status >= 500 else None
    except ValueError:  # not a valid id of a hub: reading the files raises the error
        return None
    except Exception as error:  # the client's errors differ between its versions; the system's are OSErrors
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no answer'}"
    return None
