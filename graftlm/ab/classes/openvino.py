"""A model of optimum-intel behind a framework's class for models in the process."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

_KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def same_work(model: str) -> dict[str, Any]:
    """What OpenVINO is told so that it computes in the model's precision, with as many threads as other engines.

    By itself it takes all cores, and bfloat16 wherever the processor multiplies it.
    """
    config = Path(model) / "config.json"
    told = json.loads(config.read_text()) if config.is_file() else {}
    kind = _KINDS.get(str(told.get("dtype") or told.get("torch_dtype")))
    precision = {} if kind is None else dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), kind)
    threads = os.environ.get("OMP_NUM_THREADS")
    return precision | ({} if threads is None else {"INFERENCE_NUM_THREADS": int(threads)})


def one_call_at_a_time(model: Any) -> None:
    """Let the threads of a framework's batch wait for one another in `generate`: OpenVINO refuses two calls at once."""
    lock, generate = threading.Lock(), model.generate

    def locked(*arguments: Any, **options: Any) -> Any:
        with lock:
            return generate(*arguments, **options)

    model.generate = locked
